"""Checkpoints: whole or not there, checked, pruned, and never lost to a full disk."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from convmesh.engines.contract import TrainState
from convmesh.errors import CheckpointError
from convmesh.training import checkpoint as module
from convmesh.training.checkpoint import (
    Progress,
    find_checkpoints,
    load_checkpoint,
    load_newest,
    prune_checkpoints,
    save_checkpoint,
)


def state(value=1.0):
    return TrainState(
        network={"conv.weight": np.full((4, 3, 3, 3), value, np.float32), "bn.num": np.array(7, np.int64)},
        optimizer={"momentum/conv.weight": np.full((4, 3, 3, 3), -value, np.float32)},
        num_updates=int(value),
    )


def test_what_was_saved_comes_back(tmp_path):
    progress = Progress(update=12, epoch=1, update_in_epoch=2, loss_scale={"scale": 8.0}, best_accuracy=0.5)
    path = save_checkpoint(tmp_path, state(3.0), progress=progress, about={"mesh": {"data": 2}})
    back = load_checkpoint(path)
    assert back.progress == progress
    assert back.about["mesh"] == {"data": 2}
    assert back.state.num_updates == 3
    assert back.state.average == {}
    for name, array in state(3.0).network.items():
        np.testing.assert_array_equal(back.state.network[name], array)
        assert back.state.network[name].dtype == array.dtype


def test_a_damaged_newest_is_passed_over_and_told(tmp_path):
    good = save_checkpoint(tmp_path, state(), progress=Progress(update=1))
    bad = save_checkpoint(tmp_path, state(), progress=Progress(update=2))
    content = bytearray((bad / "network.safetensors").read_bytes())
    content[-1] ^= 1
    (bad / "network.safetensors").write_bytes(content)
    newest, problems = load_newest(tmp_path)
    assert newest.path == good
    assert "digest" in problems[0]
    (good / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        load_newest(tmp_path)


def test_no_checkpoint_yet_is_no_error(tmp_path):
    assert load_newest(tmp_path) == (None, [])


def test_another_format_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, state(), progress=Progress(update=1))
    content = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(CheckpointError, match="another format"):
        load_checkpoint(path)


def test_the_newest_and_the_best_stay(tmp_path):
    for update in range(1, 8):
        save_checkpoint(tmp_path, state(), progress=Progress(update=update))
    prune_checkpoints(tmp_path, keep=2, best_update=3)
    assert [path.name[-1] for path in find_checkpoints(tmp_path)] == ["7", "6", "3"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    old = save_checkpoint(tmp_path, state(), progress=Progress(update=1))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path, state(2.0), progress=Progress(update=2))
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert load_checkpoint(old).state.num_updates == 1


@pytest.mark.parametrize("delay_seconds", [0.0, 0.01, 0.03, 0.08])
def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path, delay_seconds):
    script = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from convmesh.training.checkpoint import *; from convmesh.engines.contract import TrainState\n"
        "print('ready', flush=True)\n"
        "for update in range(1, 10**6):\n"
        "    network = {'w': np.full(200_000, update, np.float32)}\n"
        "    save_checkpoint(Path(sys.argv[1]), TrainState(network), progress=Progress(update=update))\n"
        "    prune_checkpoints(Path(sys.argv[1]), keep=2, best_update=None)\n"
        "    print(update, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    for _ in range(4):  # "ready" and three updates
        process.stdout.readline()
    time.sleep(delay_seconds)
    process.kill()
    process.communicate()
    newest, problems = load_newest(tmp_path)
    assert problems == []
    assert newest.progress.update >= 3
    assert (newest.state.network["w"] == newest.progress.update).all()


def test_files_are_flushed_before_the_rename(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("flush"))
    rename = module.Path.rename
    monkeypatch.setattr(module.Path, "rename", lambda self, to: (events.append("rename"), rename(self, to))[1])
    save_checkpoint(tmp_path, state(), progress=Progress(update=1))
    assert events.index("rename") >= 3
    assert events[-1] == "flush"
