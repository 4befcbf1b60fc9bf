"""The training loops in the README run as they stand there and train what one device trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
LOOPS = {"torch": "torch.optim.SGD", "mindspore": "mindspore.value_and_grad"}
"""Engine to what its loop is found by."""


def loop_of(engine: str, page: str = "README.md") -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    (loop,) = [block for block in blocks if LOOPS[engine] in block]
    return loop


@pytest.mark.parametrize("engine", LOOPS)
def test_a_loop_of_the_readme_equals_one_device(rank_pool: Callable[[str, int], RankPool], engine: str) -> None:
    code = loop_of(engine)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    case = "tests.multiprocess.readme_loops:run"
    for answer in rank_pool(engine, 4).run(case, timeout_seconds=200, name=engine, code=code):
        assert answer["state"].keys() == answer["expected"].keys()
        for name, value in answer["expected"].items():
            np.testing.assert_allclose(answer["state"][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert answer["num_held"] < answer["num_whole"]


@pytest.mark.parametrize("engine", LOOPS)
def test_the_loops_of_both_languages_are_one(engine: str) -> None:
    def without_comments(code: str) -> str:
        return re.sub(r"\s+#.*", "", code)

    assert without_comments(loop_of(engine)) == without_comments(loop_of(engine, "README.zh-CN.md"))
