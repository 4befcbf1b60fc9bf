"""What commands and snippets need that run within the process of the tests."""

from __future__ import annotations

import pytest

from convmesh.engines import is_installed


@pytest.fixture(scope="session", autouse=True)
def _mindspore_on_the_cpu() -> None:
    """MindSpore can't be told its device any more once it has computed, as commands here make it do."""
    if is_installed("mindspore"):
        import mindspore

        mindspore.set_device("CPU")
