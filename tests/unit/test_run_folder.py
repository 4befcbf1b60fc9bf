"""The run folder: whose it is, and what may change when a run goes on."""

import subprocess
import sys

import pytest

from convmesh.config import load_config, parse_config
from convmesh.errors import MistakeList, RunFolderError
from convmesh.training.run_folder import RunFolder, default_run_dir, write_atomically


def run(**train):
    return parse_config({"model": {"name": "cnn-small"}, "data": {"source": "digits"}, "train": train})


def test_the_resolved_run_is_saved(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.prepare(run(epochs=3), resume=False)
    assert load_config(folder.config) == run(epochs=3)
    folder.release()


def test_another_run_is_not_overwritten(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare(run(), resume=False)
    folder.release()
    with pytest.raises(RunFolderError, match="--resume"):
        RunFolder(tmp_path).prepare(run(), resume=False)


def test_two_runs_in_one_folder_at_once(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare(run(), resume=False)
    script = (
        "import sys; from convmesh.training.run_folder import RunFolder; from convmesh.config import load_config\n"
        "folder = RunFolder(sys.argv[1]); folder.prepare(load_config(folder.config), resume=True)"
    )
    second = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "another run is using the folder" in second.stderr
    folder.release()
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 0


def test_a_resumed_run_may_change_how_but_not_what(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare(run(seed=1, global_batch=32), resume=False)
    folder.release()
    folder.prepare(run(seed=1, global_batch=32, epochs=50, log_every_steps=1, keep=9), resume=True)
    folder.release()
    with pytest.raises(MistakeList) as caught:
        folder.prepare(run(seed=2, global_batch=64, epochs=50), resume=True)
    assert "train.seed" in str(caught.value)
    assert "got 64, expected 32" in str(caught.value)
    folder.release()


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(RunFolderError, match=r"no run in .* to resume"):
        RunFolder(tmp_path / "typo").prepare(run(), resume=True)


def test_an_unwritable_place_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="can't be written"):
        RunFolder(tmp_path / "file" / "run").prepare(run(), resume=False)


def test_resume_finds_the_newest_run_of_the_same_file(tmp_path):
    for name in ("a-20260101-000000", "a-20260102-000000", "b-20260103-000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
    assert default_run_dir(tmp_path / "a.yaml", resume=True, parent=tmp_path).name == "a-20260102-000000"
    with pytest.raises(RunFolderError, match="to resume"):
        default_run_dir(tmp_path / "c.yaml", resume=True, parent=tmp_path)


def test_an_interrupted_write_keeps_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(RunFolderError, match="can't be written"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
