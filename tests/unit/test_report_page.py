"""The report: complete, self-contained, and unbroken by whatever a run left behind."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_runs import FakeRun, fake_summary, write_fake_run

from convmesh.errors import RunFolderError
from convmesh.report.html import write_report
from convmesh.report.run_folder import read_run

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Checks that tags are closed in order; keeps tags, attributes and visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(run_dir: Path) -> Outline:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert [file.name for file in run_dir.iterdir() if file.name.startswith(".report")] == []
    return Outline(path.read_text("utf-8"))


def test_a_finished_run_has_everything(tmp_path: Path) -> None:
    page = report(write_fake_run(tmp_path, FakeRun()))
    for words in (
        "cnn-small on cifar10", "finished", "59.31 %", "best 59.31 % at update 628", "704", "1 min 28 s", "70,890",
        "MindSpore · cpu · data=2", "Collectives per update", "278.7 KiB", "equal on all ranks in 2 checks",
        "Loss", "Accuracy", "Throughput", "Learning rate", "Time of an update", "waiting for data", "Peak memory",
        "Optimizer state", "gradients", "all-reduce", "Class balance", "as even as whole samples allow", "airplane",
        "data order: stratified over 10 classes", "global_batch: 64", "2.10.0", "checkpoints/step-00000628",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.count("svg") == 8
    assert "Loss scale" not in page.text


def test_it_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    page = report(write_fake_run(tmp_path, FakeRun(compute="float16")))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "image", "use")
        assert not {"src", "href", "xlink:href"} & attributes.keys()
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_float16_shows_the_scale_and_what_was_skipped(tmp_path: Path) -> None:
    page = report(write_fake_run(tmp_path, FakeRun(compute="float16")))
    assert "Loss scale" in page.text
    assert "2^18" in page.text
    assert "6 updates were skipped because a gradient overflowed" in page.text


def test_the_rank_that_waits_for_data_is_named(tmp_path: Path) -> None:
    assert (
        "Rank 3 waits longest for its data" in report(write_fake_run(tmp_path, FakeRun(num_ranks=8, slow_rank=3))).text
    )


def test_a_killed_run_still_has_a_report(tmp_path: Path) -> None:
    write_fake_run(tmp_path, FakeRun(with_summary=False))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "update": 6')
    page = report(tmp_path)
    assert "unfinished" in page.text
    assert "ended after update 628 before it finished" in page.text
    assert "59.21 %" in page.text


def test_losses_that_are_no_numbers_are_marked(tmp_path: Path) -> None:
    page = report(write_fake_run(tmp_path, FakeRun(diverges_at=300)))
    assert "36 of 66 logged losses are not finite" in page.text
    assert "first at update 300" in page.text
    paths = [attributes.get("d") or "" for tag, attributes in page.tags if tag == "path"]
    assert not any("nan" in path or "inf" in path for path in paths)


def test_a_resumed_run_counts_its_later_updates(tmp_path: Path) -> None:
    write_fake_run(tmp_path, FakeRun(resumed_at=320))
    run = read_run(tmp_path)
    updates = [step["update"] for step in run.steps]
    assert updates == sorted(set(updates))
    assert len(run.starts) == 2
    assert "The run was resumed once, from update 320" in report(tmp_path).text
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if line["kind"] == "step" and line["update"] == 330][-1]
    assert next(step for step in run.steps if step["update"] == 330)["loss"] == later["loss"]


def test_what_a_resumed_run_undid_is_gone(tmp_path: Path) -> None:
    kinds = [("start", 0), ("step", 10), ("eval", 10), ("step", 17), ("eval", 20), ("start", 12), ("step", 14)]
    lines = [json.dumps({"kind": kind, "update": update, "loss": 1.0}) + "\n" for kind, update in kinds]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run = read_run(tmp_path)
    assert [step["update"] for step in run.steps] == [10, 14]
    assert [record["update"] for record in run.evals] == [10]


@pytest.mark.parametrize(
    "fake",
    [
        FakeRun(num_ranks=1, epochs=1, updates_per_epoch=1, log_every=1, num_classes=2),
        FakeRun(num_ranks=1, epochs=1, updates_per_epoch=1, log_every=1, diverges_at=0, with_summary=False),
        FakeRun(num_ranks=64, num_classes=1000, epochs=2),
    ],
    ids=["one step", "one step, not finite", "64 ranks, 1000 classes"],
)
def test_small_and_large_runs(tmp_path: Path, fake: FakeRun) -> None:
    page = report(write_fake_run(tmp_path, fake))
    assert "Loss" in page.text
    assert (tmp_path / "report.html").stat().st_size < 600_000


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    report(write_fake_run(tmp_path, FakeRun(epochs=90, updates_per_epoch=1000)))
    assert (tmp_path / "report.html").stat().st_size < 250_000


def test_text_of_the_run_is_never_markup(tmp_path: Path) -> None:
    evil = "</script></pre><script>alert(1)</script>\"'><b onclick=x>"
    write_fake_run(tmp_path, FakeRun(num_classes=2))
    (tmp_path / "config.yaml").write_text(f"model: {{name: {json.dumps(evil)}}}\ndata: {{source: x}}\n# {evil}\n")
    (tmp_path / "versions.json").write_text(json.dumps({evil: evil, "nested": {evil: 1}}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for kind in ("event", "checkpoint"):
            file.write(json.dumps({"kind": kind, "level": evil, "text": evil, "path": evil, "update": 999}) + "\n")
    summary = fake_summary(FakeRun(num_classes=2))
    summary |= {"status": evil, "engine": evil, "device": evil, "mesh": {evil: evil}}
    summary["class_balance"]["class_names"] = [evil, evil]
    summary["collectives"] = [{"purpose": evil, "kind": evil, "number": 1, "num_bytes": 1}]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = report(tmp_path)
    assert page.count("script") == 1
    assert page.count("b") == 0
    assert not any("onclick" in attributes for _, attributes in page.tags)
    assert evil in page.text


@pytest.mark.parametrize("name", ["summary.json", "versions.json", "config.yaml"])
@pytest.mark.parametrize(
    "content", ["", "{", "[1, 2]", "null", "\x00", "a: [", '{"class_balance": {"counts": [[1], []]}}']
)
def test_damaged_files_do_not_break_it(tmp_path: Path, name: str, content: str) -> None:
    write_fake_run(tmp_path, FakeRun(epochs=1))
    (tmp_path / name).write_text(content)
    report(tmp_path)


@pytest.mark.parametrize("value", [None, "text", [], {}, [None], float("nan"), True, [["x"]], -1, 1e300])
def test_odd_values_do_not_break_it(tmp_path: Path, value: object) -> None:
    write_fake_run(tmp_path, FakeRun(epochs=1))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    odd = [{key: value if key != "kind" else kind for key, kind in record.items()} for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, *odd]))
    (tmp_path / "summary.json").write_text(json.dumps(dict.fromkeys(fake_summary(FakeRun()), value)))
    report(tmp_path)


def test_a_run_without_metrics_lines_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "ended before its first line of metrics" in report(tmp_path).text


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        write_report(tmp_path)
