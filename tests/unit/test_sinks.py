"""Sinks: what trackers are told, that none of them can harm a training, and the real libraries without a network."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from convmesh.api import prepare
from convmesh.config import check_config, parse_config
from convmesh.config.load import dotted, plain_config
from convmesh.errors import ConfigError, MistakeList
from convmesh.mesh import Mesh
from convmesh.training.metrics import Fanout, JsonLinesSink
from convmesh.training.sinks import missing_sinks, open_sinks
from convmesh.training.sinks.background import BackgroundSink
from convmesh.training.sinks.tracker import RunAbout, scalars_of

STEP = {
    "kind": "step",
    "update": 10,
    "epoch": 0,
    "num_updates": 40,
    "loss": 2.5,
    "learning_rate": 0.1,
    "step_seconds": [1.0, 3.0],
    "gradient_norm": None,
    "eta_seconds": 9.0,
}
EVAL = {"kind": "eval", "update": 10, "epoch": 0, "loss": math.nan, "accuracy": 0.75}


def run_with(**train: Any) -> Any:
    return parse_config({"model": {"name": "cnn-small"}, "data": {"source": "digits"}, "train": train})


class _Tracker:
    place = "here"

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, scalars: Mapping[str, float], *, update: int) -> None:
        self.told.append((update, dict(scalars)))

    def close(self) -> None:
        self.closed += 1


def test_trackers_are_told_finite_numbers_by_group() -> None:
    assert scalars_of(STEP) == {"train/loss": 2.5, "train/learning_rate": 0.1, "train/step_seconds": 2.0}
    assert scalars_of(EVAL) == {"eval/accuracy": 0.75}
    assert scalars_of({"kind": "checkpoint", "update": 3, "num_bytes": 5}) == {}
    assert scalars_of({"kind": "event", "level": "warning", "text": "x"}) == {}


def test_settings_are_told_by_the_names_of_run_files() -> None:
    settings = dotted(plain_config(run_with(sinks=["tensorboard"])))

    assert settings["train.sinks"] == ["tensorboard"]
    assert settings["model.name"] == "cnn-small"
    assert settings["precision.loss_scale.window"] == 200


def test_records_reach_the_tracker_in_order_and_it_is_closed_once() -> None:
    tracker, events = _Tracker(), []
    sink = BackgroundSink("fake", lambda: tracker, on_event=lambda *event: events.append(event))

    for update in range(5):
        sink.write({**STEP, "update": update})
    sink.write({"kind": "event", "level": "info", "text": "x"})
    sink.close()
    sink.close()

    assert [update for update, _ in tracker.told] == list(range(5))
    assert tracker.closed == 1
    assert events == [("info", "the sink 'fake' writes to here")]


@pytest.mark.parametrize("where", ["open", "log", "close", "exit"])
def test_a_tracker_that_fails_says_so_once_and_hurts_nobody(where: str, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise SystemExit(3) if where == "exit" else OSError("no route to host")

    tracker = _Tracker()
    if where in ("log", "close"):
        setattr(tracker, where, fail)
    sinks = Fanout(JsonLinesSink(tmp_path / "metrics.jsonl"))

    def tell(level: str, text: str) -> None:
        sinks.write({"kind": "event", "level": level, "text": text})

    sinks.add(BackgroundSink("fake", fail if where in ("open", "exit") else lambda: tracker, on_event=tell))
    for _ in range(3):
        sinks.write(STEP)
    sinks.close()

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    warnings = [record["text"] for record in records if record.get("level") == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("the sink 'fake' failed")
    assert sum(record["kind"] == "step" for record in records) == 3


def test_a_tracker_that_hangs_neither_slows_nor_keeps_a_run() -> None:
    stop, events = threading.Event(), []
    tracker = _Tracker()
    tracker.log = lambda *_, **__: stop.wait(30)  # type: ignore[assignment]
    sink = BackgroundSink(
        "fake", lambda: tracker, on_event=lambda level, text: events.append((level, text)), patience_seconds=0.2
    )

    begun = time.monotonic()
    sink.write(STEP)
    sink.close()
    assert time.monotonic() - begun < 10
    assert events[-1][0] == "warning"
    assert "does not answer" in events[-1][1]
    stop.set()


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    (error,) = missing_sinks(run_with(sinks=["wandb"]))

    assert "pip install 'convmesh[wandb]'" in str(error)


def test_missing_libraries_are_told_with_all_other_mistakes_before_a_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("convmesh.training.sinks.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("convmesh.api.missing_engine", lambda run: [])

    with pytest.raises(MistakeList) as found:
        prepare(run_with(sinks=["mlflow", "swanlab"], global_batch=7), ranks=2)

    told = str(found.value)
    assert "global_batch" in told
    assert "convmesh[mlflow]" in told
    assert "convmesh[swanlab]" in told


def test_unknown_and_repeated_sinks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.sinks"):
        run_with(sinks=["tensorbored"])
    assert [str(error) for error in check_config(run_with(sinks=["wandb", "wandb"]), mesh=Mesh({"data": 1}))] == [
        "a sink stands twice in train.sinks (got wandb, wandb). Name each once."
    ]


# The real libraries, without a network.


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    # Set by our own sink; put back after the test.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def _write(name: str, module: str, run_dir: Path, *, update: int, records: list[dict[str, Any]]) -> None:
    pytest.importorskip(module)
    run_dir.mkdir(exist_ok=True)
    events: list[tuple[str, str]] = []
    run = run_with(sinks=[name], project="trials")
    (sink,) = open_sinks(run, run_dir=run_dir, update=update, on_event=lambda *event: events.append(event))
    for record in records:
        sink.write(record)
    sink.close()
    assert [level for level, _ in events] == ["info"], events


def _steps(*updates: int) -> list[dict[str, Any]]:
    return [{**STEP, "update": update, "loss": 100.0 - update} for update in updates]


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _write("tensorboard", "tensorboardX", run_dir, update=0, records=_steps(10, 20, 30))
    time.sleep(1.1)  # Files are named by the second.
    _write("tensorboard", "tensorboardX", run_dir, update=20, records=_steps(30, 40))

    first, second = (list(_events(path)) for path in sorted((run_dir / "sinks" / "tensorboard").glob("events*")))
    assert _points(first) == [(10, 90.0), (20, 80.0), (30, 70.0)]
    assert _points(second) == [(30, 70.0), (40, 60.0)]
    assert [event.step for event in second if event.session_log.status] == [21]  # Hides what came after.
    texts = [text for event in first for value in event.summary.value for text in value.tensor.string_val]
    assert any(b"| model.name | `cnn-small` |" in text for text in texts)


def _events(path: Path) -> Any:
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield event_pb2.Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


def _points(events: list[Any]) -> list[tuple[int, float]]:
    return [
        (event.step, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.tag == "train/loss"
    ]


@pytest.mark.usefixtures("no_network")
def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _write("mlflow", "mlflow", run_dir, update=0, records=[*_steps(10, 20), {**EVAL, "update": 20}])
    _write("mlflow", "mlflow", run_dir, update=20, records=_steps(30))

    client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(10, 90.0), (20, 80.0), (30, 70.0)]
    assert found.data.metrics["eval/accuracy"] == 0.75
    assert found.data.params["train.project"] == "trials"
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_offline_trackers_keep_all_points_of_both_parts_under_one_number(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _write(name, name, run_dir, update=0, records=_steps(10, 20))
    number = (run_dir / "sinks" / f"{name}.id").read_text().strip()
    time.sleep(1.1)  # Folders are named by the second.
    _write(name, name, run_dir, update=20, records=_steps(30))

    files = sorted(run_dir.glob(f"sinks/{name}/*run-2*/*.{name}"))
    assert len(files) == 2
    version = [int(part) for part in importlib.metadata.version(name).split(".")[:2]]
    if name == "wandb" or version >= [0, 10]:  # Older ones of SwanLab begin another run.
        assert all(number in str(file) for file in files)
    for file, losses in zip(files, (("90", "80"), ("70",)), strict=True):
        content = file.read_bytes()
        assert content.count(b"train/loss") >= len(losses)
        assert b"trials" in content


def test_a_number_is_kept_per_tracker(tmp_path: Path) -> None:
    about = RunAbout(run_dir=tmp_path, project="p", update=0, config={})
    assert about.number("wandb") is None
    about.keep_number("wandb", "a1")
    about.keep_number("mlflow", "b2")
    assert (about.number("wandb"), about.number("mlflow")) == ("a1", "b2")
