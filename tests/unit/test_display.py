"""The display of a run, and following its file."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FakeRun, fake_records
from rich.console import Console

from convmesh.report.display import Display, follow_metrics


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Takes:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: Any) -> None:
        self.records.append(dict(record))


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=200), out


def lines_of(records: list[dict[str, Any]], seconds_per_record: float) -> list[str]:
    console, out = plain()
    clock = Clock()
    display = Display(console, clock=clock)
    for record in records:
        display.write(record)
        clock.seconds += seconds_per_record
    display.close()
    return out.getvalue().splitlines()


def test_plain_lines_tell_the_numbers() -> None:
    lines = lines_of(fake_records(FakeRun(compute="float16", epochs=2)), seconds_per_record=10)
    assert lines[0] == "training: 2 ranks, mindspore, cpu, 314 updates, 2 epochs"
    step = next(line for line in lines if line.startswith("epoch 1/2  update 60/314"))
    assert "loss " in step
    assert " images/s" in step
    assert "scale 2^18" in step
    assert "skipped 6" in step
    assert " left" in step
    assert any(line.startswith("evaluation: accuracy ") and "of 10,000 samples" in line for line in lines)
    assert any(line.startswith("epoch 2/2 done: training loss") for line in lines)
    assert any(line.startswith("checkpoint checkpoints/step-") for line in lines)


def test_scale_is_shown_only_with_float16() -> None:
    assert not any("scale" in line for line in lines_of(fake_records(FakeRun()), seconds_per_record=10))


def test_plain_lines_come_at_a_sane_rate() -> None:
    steps = [{"kind": "step", "update": n, "num_updates": 10_000, "loss": 1.0} for n in range(1, 10_001)]
    fast = lines_of(steps, seconds_per_record=0.01)
    assert 15 < len(fast) < 25  # 100 seconds, a line every 5
    assert "update 1/10,000" in fast[0]
    assert "update 10,000/10,000" in fast[-1]
    slow = lines_of(steps, seconds_per_record=8.64)  # a day: about one line a minute
    assert len(slow) < 1700


def test_a_resumed_run_says_where_it_goes_on() -> None:
    records = fake_records(FakeRun(resumed_at=320))
    assert "going on after update 320: " in "\n".join(lines_of(records, 1))


def test_text_of_the_run_is_no_markup() -> None:
    (line,) = lines_of([{"kind": "event", "level": "warning", "text": "[red]bad[/red] [/x] file"}], 1)
    assert line == "warning: [red]bad[/red] [/x] file"


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", [1]])
def test_odd_values_do_not_stop_the_display(value: object) -> None:
    keys = ["epoch", "update", "num_updates", "loss", "accuracy", "images_per_second", "eta_seconds", "num_bytes"]
    keys += ["loss_scale", "skipped_updates", "num_ranks", "epochs", "seconds", "num_samples", "config"]
    kinds = ["start", "step", "epoch", "eval", "checkpoint", "event", "from the future"]
    records = [{"kind": kind, **dict.fromkeys(keys, value)} for kind in kinds] + [{"kind": kind} for kind in kinds]
    assert lines_of(records, 1)
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=60))
    for record in records:
        display.write(record)
    display.close()


def test_terminal_shows_bar_and_numbers_and_keeps_what_ended() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=80, color_system=None))
    for record in fake_records(FakeRun(epochs=2)):
        display.write(record)
    display.close()
    display.close()
    text = out.getvalue()
    assert "━" in text
    assert "314/314" in text
    assert "epoch 2/2 done" in text
    assert "accuracy" in text


def test_follow_takes_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole, half = '{"kind":"event","text":"ä"}\n', '{"kind":"ev'
    path.write_text(whole + half)
    takes, stop = Takes(), threading.Event()
    stop.set()
    offset = follow_metrics(path, takes, stop)
    assert [record["text"] for record in takes.records] == ["ä"]
    assert offset == len(whole.encode())
    with path.open("a") as file:
        file.write('ent","text":"b"}\n')
    assert follow_metrics(path, takes, stop, offset=offset) == path.stat().st_size
    assert [record["text"] for record in takes.records] == ["ä", "b"]


def test_follow_waits_for_the_file_and_reads_all_that_came_before_the_stop(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    takes, stop = Takes(), threading.Event()
    thread = threading.Thread(target=follow_metrics, args=(path, takes, stop), kwargs={"poll_seconds": 0.005})
    thread.start()
    records = [{"kind": "step", "update": update} for update in range(500)]
    with path.open("w", buffering=1) as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    stop.set()
    thread.join(timeout=20)
    assert takes.records == records


def test_follow_survives_what_a_killed_run_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"kind": "step", "upd{"kind": "start", "update": 3}\nnot json\n[1]\n{"kind": "event", "text": "x"}\n'
    )
    takes, stop = Takes(), threading.Event()
    stop.set()
    follow_metrics(path, takes, stop)
    assert [record["kind"] for record in takes.records] == ["start", "event"]


def test_follow_goes_on_at_the_end_of_a_file_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "event", "text": "old"}\n')
    takes, stop = Takes(), threading.Event()
    stop.set()
    assert follow_metrics(path, takes, stop, offset=10_000) == path.stat().st_size
    assert takes.records == []
