"""Every block of Python and YAML in the README and the documentation is valid; those that stand alone run.

The loops for split networks run in `tests.multiprocess.test_readme_loops`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import convmesh
from convmesh.config import parse_config
from convmesh.plan.load import load_plan
from tests.docs.pages import OTHER_LANGUAGE, PAGES, Block, blocks

PYTHON = [block for page in PAGES for block in blocks(page, "python")]
YAML = [block for page in PAGES for block in blocks(page, "yaml")]


def identity(block: Block) -> str:
    return f"{block.page}: {block.text.splitlines()[0]}"


@pytest.mark.parametrize("page", OTHER_LANGUAGE)
def test_both_languages_show_the_same_code(page: str) -> None:
    shown, other = ([(block.language, block.code) for block in blocks(name)] for name in (page, OTHER_LANGUAGE[page]))
    assert shown == other


@pytest.mark.parametrize("block", PYTHON, ids=identity)
def test_python_is_valid(block: Block) -> None:
    compile(block.text, block.page, "exec")


@pytest.mark.parametrize("block", YAML, ids=identity)
def test_yaml_is_a_run_a_part_of_one_or_a_plan(block: Block, tmp_path: Path) -> None:
    content = yaml.safe_load(block.text)
    if "schema_version" in content and "operators" in content:
        path = tmp_path / "plan.yaml"
        path.write_text(block.text)
        assert load_plan(path).entries
        return
    whole = {
        "engine": "torch",
        "model": {"name": "cnn-small"},
        "data": {"source": "digits"},
        "optimizer": {"learning_rate": 0.1},
        "train": {"epochs": 1, "global_batch": 64},
    }
    parse_config({**whole, **content})


def find(text: str) -> str:
    (block,) = [block for block in blocks("docs/en/tutorial.md", "python") if text in block.text]
    return block.text


@pytest.mark.torch
def test_the_network_of_the_tutorial_is_built_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(find("def build(width"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import mine

    assert mine.build(width=4)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    sys.modules.pop("mine")


@pytest.mark.torch
def test_the_loop_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    labels = np.arange(520) % 10
    network = torch.nn.Linear(4, 10)
    names = {
        "torch": torch,
        "labels": labels,
        "dataset": torch.utils.data.TensorDataset(torch.zeros(len(labels), 4), torch.from_numpy(labels)),
        "rank": 0,
        "world_size": 1,
        "network": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
    }
    exec(find("convmesh.StratifiedSampler(labels"), names)
    assert (tmp_path / "checkpoints").is_dir()
    assert names["convmesh"] is convmesh
