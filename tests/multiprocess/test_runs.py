"""Whole runs through the command line: what a user does, and what can happen to a run."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from convmesh.engines import is_installed
from convmesh.plan.load import load_plan
from convmesh.training.checkpoint import find_checkpoints
from convmesh.training.launch import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

CONFIG = """
engine: torch
model: {name: cnn-small, args: {batch_norm: true}}
data: {source: digits, augment: {crop_padding: 1, flip: true}}
optimizer: {learning_rate: 0.05, weight_decay: 1.0e-4}
train: {epochs: 2, global_batch: 48, log_every_steps: 4, checkpoint_every_steps: 5, check_sync_every: 7, keep: 100}
"""
ENGINES = [
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("mindspore", marks=pytest.mark.mindspore),
]


@pytest.fixture(scope="module", autouse=True)
def digits(tmp_path_factory):
    """The digits of scikit-learn, fetched as a user does."""
    root = tmp_path_factory.mktemp("data")
    os.environ["CONVMESH_DATA"] = str(root)
    convmesh("data", "fetch", "digits")
    yield root
    del os.environ["CONVMESH_DATA"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def start(*arguments, **kwargs):
    command = [sys.executable, "-m", "convmesh.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def convmesh(*arguments, code=0, seconds=240, **kwargs):
    process = start(*arguments, **kwargs)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return out + err


def need(engine):
    if not is_installed(engine):
        pytest.skip(f"{engine} is not installed")


def records(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def final_network(run_dir):
    return load_file(find_checkpoints(run_dir / "checkpoints")[0] / "network.safetensors")


def wait_for_checkpoint(run_dir, number, process, seconds=120):
    deadline = time.monotonic() + seconds
    while len(find_checkpoints(run_dir / "checkpoints")) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_everything(process):
    """kill -9 for the command and all it started, at once."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            member.kill()
    process.communicate()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_on_two_ranks_leaves_what_it_promises(config, tmp_path, engine):
    need(engine)
    sinks = ["tensorboard"] if importlib.util.find_spec("tensorboardX") else []
    settings = ["--engine", engine, "--ranks", 2, "--set", f"train.sinks={sinks}"]
    out = convmesh("train", config, *settings, "--run-dir", tmp_path / "run")
    run_dir = tmp_path / "run"
    assert "Accuracy" in out
    assert "report.html" in out
    for name in ("config.yaml", "versions.json", "metrics.jsonl", "summary.json", "report.html", "logs/rank_1.log"):
        assert (run_dir / name).exists(), name
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["accuracy"] > 0.5
    assert summary["num_updates"] == 60
    assert len(summary["peak_memory_bytes"]) == 2
    assert summary["sync_checks"] == 2 + 60 // 7
    assert all(count["number"] > 0 for count in summary["collectives"])
    assert [record["num_samples"] for record in records(run_dir, "eval")] == [359, 359]
    assert records(run_dir, "step")[-1]["update"] == 60
    assert all(len(record["step_seconds"]) == 2 for record in records(run_dir, "step"))
    assert records(run_dir, "end")[0]["accuracy"] == summary["accuracy"]
    assert len(list(run_dir.glob("sinks/tensorboard/events*"))) == len(sinks)  # One rank writes them.


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_resumes_to_the_same_bits(config, tmp_path, engine):
    need(engine)
    settings = ["--engine", engine, "--ranks", 2, "--set", "strategy.accumulation=2", "--set", "optimizer.name=adamw"]
    settings += ["--set", "train.weight_average=0.9", "--set", "optimizer.learning_rate=0.002"]
    convmesh("train", config, *settings, "--run-dir", tmp_path / "whole")
    process = start("train", config, *settings, "--run-dir", tmp_path / "killed")
    wait_for_checkpoint(tmp_path / "killed", 3, process)
    kill_everything(process)
    assert len(find_checkpoints(tmp_path / "killed" / "checkpoints")) < 12
    convmesh("train", config, *settings, "--run-dir", tmp_path / "killed", "--resume")
    for part in ("network", "optimizer", "average"):
        whole, resumed = (
            load_file(find_checkpoints(tmp_path / name / "checkpoints")[0] / f"{part}.safetensors")
            for name in ("whole", "killed")
        )
        assert list(whole) == list(resumed)
        for name, array in whole.items():
            np.testing.assert_array_equal(array, resumed[name], err_msg=f"{part} {name}")
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert len(summary["resumed_from"]) == 1
    assert records(tmp_path / "whole", "eval")[-1]["accuracy"] == records(tmp_path / "killed", "eval")[-1]["accuracy"]


@pytest.mark.torch
def test_a_run_goes_on_with_another_number_of_ranks(config, tmp_path):
    need("torch")
    settings = ["--set", "model.args.batch_norm=false", "--run-dir"]
    convmesh("train", config, "--ranks", 1, *settings, tmp_path / "one")
    process = start(
        "train", config, "--ranks", 2, "--set", "strategy.optimizer_sharding=true", *settings, tmp_path / "r"
    )
    wait_for_checkpoint(tmp_path / "r", 4, process)
    kill_everything(process)
    convmesh("train", config, "--ranks", 1, *settings, tmp_path / "r", "--resume")
    for name, array in final_network(tmp_path / "one").items():
        np.testing.assert_allclose(final_network(tmp_path / "r")[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_rank_ends_the_run_with_a_sentence(config, tmp_path, engine):
    need(engine)
    process = start(
        "train", config, "--engine", engine, "--ranks", 2, "--run-dir", tmp_path / "run", "--set", "train.epochs=500"
    )
    wait_for_checkpoint(tmp_path / "run", 1, process)
    pids = [int((tmp_path / "run" / "logs" / f"rank_{rank}.pid").read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert "rank 1 died" in err
    assert "--resume" in err
    assert "Traceback" not in err
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert find_checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_end_with_the_killed_command_and_the_run_goes_on(config, tmp_path, engine):
    need(engine)
    settings = ["--engine", engine, "--ranks", 2, "--run-dir", tmp_path / "run"]
    process = start("train", config, *settings, "--set", "train.epochs=500")
    wait_for_checkpoint(tmp_path / "run", 1, process)
    ranks = [int((tmp_path / "run" / "logs" / f"rank_{rank}.pid").read_text()) for rank in range(2)]
    process.kill()
    process.communicate()
    if engine == "torch":  # What a run of MindSpore goes on with is compared above.
        done = len(records(tmp_path / "run", "eval"))
        convmesh("train", config, *settings, "--resume", "--set", f"train.epochs={done + 1}")
        assert not [rank for rank in ranks if psutil.pid_exists(rank)]
    psutil.wait_procs([psutil.Process(rank) for rank in ranks if psutil.pid_exists(rank)], timeout=60)
    assert not [rank for rank in ranks if psutil.pid_exists(rank)]


@pytest.mark.torch
def test_ranks_that_torchrun_started_are_joined(config, tmp_path):
    need("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["convmesh.cli.main", "train", str(config), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_ranks"] == 2
    assert done.stdout.count("Accuracy") == 1


def test_a_dry_run_shows_the_start_and_starts_nothing(config, tmp_path):
    out = convmesh("train", config, "--ranks", 4, "--dry-run", "--run-dir", tmp_path / "run")
    assert "torch.distributed.run" in out
    assert "--nproc-per-node=4" in out
    assert not (tmp_path / "run").exists()


def test_every_mistake_is_listed_before_a_process_starts(config, tmp_path):
    mistakes = ["--set", "train.global_batch=50", "--set", "data.path=/nonexistent", "--set", "model.name=null"]
    out = convmesh("train", config, "--ranks", 4, *mistakes, "--run-dir", tmp_path / "run", code=2)
    assert "3 things need mending" in out
    for words in ("48 or 52", "/nonexistent", "a name or a factory"):
        assert words in out
    assert not (tmp_path / "run").exists()


@pytest.mark.torch
def test_a_network_that_does_not_fit_the_classes(config, tmp_path):
    need("torch")
    options = ["--set", "model.args.num_classes=7", "--run-dir", tmp_path / "r"]
    out = convmesh("train", config, "--ranks", 2, *options, code=2)
    assert "7 outputs" in out
    assert "10 scores" in out


@pytest.mark.torch
def test_an_interrupted_run_says_how_to_go_on(config, tmp_path):
    need("torch")
    process = start("train", config, "--ranks", 2, "--run-dir", tmp_path / "run", "--set", "train.epochs=500")
    wait_for_checkpoint(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.torch
def test_a_user_network_by_factory(config, tmp_path):
    need("torch")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(width, num_classes=10):\n"
        "    return nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1),\n"
        "                         nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, num_classes))\n"
    )
    text = CONFIG.replace("name: cnn-small, args: {batch_norm: true}", "factory: 'mine:build', args: {width: 8}")
    config.write_text(text)
    out = convmesh("train", config, "--ranks", 2, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert "Accuracy" in out
    assert "0.weight" in final_network(tmp_path / "run")


def started(engine, folder, *command):
    """The command line by which others start two ranks of a command."""
    if engine == "torch":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *command]
    options = ["--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1", "--master_port", str(free_port())]
    return [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", *options, f"--log_dir={folder}", "--join=True"),
        *("python", "-m", *command),
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_planned_ranks_that_others_started_go_on_by_the_same_plan(config, tmp_path, engine):
    need(engine)
    run_dir = tmp_path / "run"
    options = ["--engine", engine, "--plan", "auto", "--run-dir", str(run_dir)]
    axis = "channel" if engine == "torch" else "data"
    endless = ["convmesh.cli.main", "train", str(config), *options, "--mesh", f"{axis}=2"]
    endless += ["--set", "train.epochs=500"]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(
            started(engine, tmp_path, *endless), stdout=out, stderr=out, env={**os.environ, "PATH": path}
        )
        wait_for_checkpoint(run_dir, 1, process)
        kill_everything(process)
    plan = load_plan(run_dir / "plan.yaml")
    assert plan.mesh.size(axis) == 2
    assert plan.foretold is not None
    done = len(records(run_dir, "eval"))
    out = convmesh(
        "train", config, *options, "--ranks", 2, "--resume", "--set", f"train.epochs={done + 1}", cwd=tmp_path
    )
    assert "foretold" in out
    assert load_plan(run_dir / "plan.yaml") == plan
    assert json.loads((run_dir / "summary.json").read_text())["num_ranks"] == 2
