"""Two runs against each other: what changed, how much, and whether more than it varies anyway."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.contenders.generated_profile import Recipe, generate
from fake_runs import FakeRun, write_fake_run
from test_report_page import Outline
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.errors import RunFolderError
from convmesh.mesh import Mesh
from convmesh.plan import Execution, Plan
from convmesh.plan.load import dump_plan
from convmesh.profiling.store import save_trace
from convmesh.report.comparison import Comparison, Measure, Sample, compare_runs
from convmesh.report.comparison_page import render_comparison
from convmesh.report.comparison_sides import flatten, read_side
from convmesh.report.profile_text import LANGUAGES, texts

QUICK = Recipe(compute=0.2, transfer=0.01, num_steps=12, jitter=0.002, num_samples={0: 16, 1: 16})
SLOW = Recipe(compute=0.3, transfer=0.02, num_steps=12, jitter=0.002, num_samples={0: 16, 1: 16})


def run_with(folder: Path, recipe: Recipe | None, *, fake: FakeRun | None = None, **config: str) -> Path:
    write_fake_run(folder, fake or FakeRun())
    text = (folder / "config.yaml").read_text()
    for before, after in config.items():
        assert before in text
        text = text.replace(before, after)
    (folder / "config.yaml").write_text(text)
    if recipe is not None:
        save_trace(generate(recipe), folder / "profile")
    return folder


def compared(before: Path, after: Path) -> Comparison:
    return compare_runs(before, after)


def by_kind(measures: tuple[Measure, ...]) -> dict[tuple[str, str], Measure]:
    return {(entry.kind, entry.of): entry for entry in measures}


def test_settings_are_dotted_keys() -> None:
    nested: dict[str, Any] = {"train": {"epochs": 6, "profile": {}}, "mesh": [1, 2], "name": "x", "none": None}
    assert flatten(nested) == {
        "train.epochs": "6", "train.profile": "{}", "mesh": "[1, 2]", "name": "x", "none": "null",
    }  # fmt: skip


def test_what_differs_in_settings_is_told_and_nothing_else(tmp_path: Path) -> None:
    before = run_with(tmp_path / "a", None)
    after = run_with(tmp_path / "b", None, **{"epochs: 4": "epochs: 9", "sampler: stratified": "num_workers: 2"})

    changes = {change.key: (change.before, change.after) for change in compared(before, after).config}

    assert changes == {
        "train.epochs": ("4", "9"),
        "data.sampler": ("stratified", None),
        "data.num_workers": (None, "2"),
    }


def test_a_plan_in_the_folder_of_its_run_is_no_other_setting(tmp_path: Path) -> None:
    own = {name: {"strategy:": f"strategy:\n  plan: /moved/since/{name}/plan.yaml"} for name in "ab"}
    before, after = (run_with(tmp_path / name, None, **own[name]) for name in "ab")
    other = run_with(tmp_path / "c", None, **own["a"])

    assert compared(before, after).config == ()
    (change,) = compared(before, other).config
    assert (change.key, change.before, change.after) == ("strategy.plan", "plan.yaml", "/moved/since/a/plan.yaml")


def test_seconds_of_profiles_have_known_answers(tmp_path: Path) -> None:
    found = compared(run_with(tmp_path / "a", QUICK), run_with(tmp_path / "b", SLOW))

    time = by_kind(found.time)
    assert found.profiled
    assert time["compute", ""].before.value == pytest.approx(0.23, abs=0.002)
    assert time["compute", ""].after.value == pytest.approx(0.33, abs=0.002)
    assert time["communication", "data"].change == pytest.approx(1.0, abs=0.1)
    assert time["images_per_second", ""].before.value == pytest.approx(32 / 0.29, rel=0.02)
    assert time["step", ""].clear is True
    assert time["data", ""].clear is False
    assert time["data", ""].change == pytest.approx(0.0, abs=1e-6)
    layer = found.layers[0]
    assert layer.kind == "compute"
    assert layer.after.value - layer.before.value == pytest.approx(0.025, abs=0.001)
    collectives = by_kind(found.collectives)
    assert collectives["transfer_seconds", "all-reduce, data (2)"].change == pytest.approx(1.0, abs=0.01)
    assert collectives["num_per_step", "all-reduce, data (2)"].before.value == 4


def test_an_axis_that_only_one_run_has_takes_no_time_in_the_other(tmp_path: Path) -> None:
    both = Recipe(mesh={"data": 2, "channel": 2}, num_steps=8)
    time = by_kind(compared(run_with(tmp_path / "a", QUICK), run_with(tmp_path / "b", both)).time)

    assert time["communication", "channel"].before.value == 0
    assert time["communication", "channel"].after.value == pytest.approx(0.04)
    assert time["communication", "channel"].clear is True


def test_ranks_that_share_samples_count_them_once(tmp_path: Path) -> None:
    shared = Recipe(mesh={"channel": 2}, num_steps=8, num_samples={0: 32, 1: 32})
    alone = Recipe(mesh={"data": 2}, num_steps=8, num_samples={0: 16, 1: 16})
    rate = by_kind(compared(run_with(tmp_path / "a", shared), run_with(tmp_path / "b", alone)).time)

    assert rate["images_per_second", ""].change == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "clear"),
    [
        ([1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4], True),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1.05, 1.15, 1.25, 1.35, 9.0], False),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2, 2.3, 2.4], None),
    ],
)
def test_a_change_is_clear_if_the_middle_halves_do_not_overlap(
    before: list[float], after: list[float], clear: bool | None
) -> None:
    samples = Sample.of(before), Sample.of([*after, float("nan")])
    assert samples[0] is not None
    assert samples[1] is not None
    assert Measure(kind="step", before=samples[0], after=samples[1]).clear is clear


def test_without_profiles_the_lines_of_metrics_are_compared(tmp_path: Path) -> None:
    slow = FakeRun(slow_rank=1)
    found = compared(run_with(tmp_path / "a", QUICK), run_with(tmp_path / "b", None, fake=slow))

    time = by_kind(found.time)
    assert not found.profiled
    assert found.layers == ()
    assert time["data", ""].after.value - time["data", ""].before.value == pytest.approx(0.015, abs=0.001)
    assert time["data", ""].clear is True
    assert "no_profile" in {remark.key for remark in found.remarks}


def test_accuracy_varies_as_that_of_so_many_samples(tmp_path: Path) -> None:
    found = compared(run_with(tmp_path / "a", None), run_with(tmp_path / "b", None))
    path = tmp_path / "b" / "summary.json"
    summary = json.loads(path.read_text())

    verdicts = []
    for accuracy in (0.5941, 0.63):
        path.write_text(json.dumps(summary | {"accuracy": accuracy}))
        verdicts.append(by_kind(compared(tmp_path / "a", tmp_path / "b").result)["accuracy", ""].clear)

    # 95 % of samples of 10,000 draw an accuracy within one point.
    sample = by_kind(found.result)["accuracy", ""].before
    assert sample.high - sample.low == pytest.approx(2 * 0.0096, abs=0.0002)
    assert verdicts == [False, True]


def test_what_must_not_be_compared_is_said(tmp_path: Path) -> None:
    before = run_with(tmp_path / "a", None)
    after = run_with(
        tmp_path / "b",
        None,
        fake=FakeRun(with_summary=False),
        **{"name: cnn-small": "name: resnet18", "source: cifar10": "source: digits", "batch: 64": "batch: 128"},
    )
    (after / "plan.yaml").write_text(dump_plan(Plan(mesh=Mesh({"data": 2}))))

    keys = {remark.key for remark in compared(before, after).remarks}

    assert {"other_network", "other_data", "other_batch", "unfinished", "one_plan"} <= keys
    assert "other_engine" not in keys


def test_plans_differ_in_what_they_decide(tmp_path: Path) -> None:
    folders = [run_with(tmp_path / name, None) for name in "ab"]
    for folder, accumulation in zip(folders, (1, 4), strict=True):
        plan = Plan(mesh=Mesh({"data": 2}), execution=Execution(accumulation=accumulation))
        (folder / "plan.yaml").write_text(dump_plan(plan))

    (change,) = compared(*folders).plan

    assert (change.key, change.before, change.after) == ("accumulation", "1", "4")


def test_profiles_without_runs_can_be_compared(tmp_path: Path) -> None:
    for name, recipe in (("a", QUICK), ("b", SLOW)):
        save_trace(generate(recipe), tmp_path / name)

    found = compared(tmp_path / "a", tmp_path / "b")

    assert by_kind(found.time)["step", ""].clear is True
    assert found.names == ("a", "b")
    assert found.config == ()
    assert found.result == ()


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        save_trace(generate(QUICK), tmp_path / name / "profile")

    found = compared(tmp_path / "a" / "profile", tmp_path / "b" / "profile")

    assert found.names == ("a/profile", "b/profile")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_is_whole_escaped_and_asks_for_nothing(tmp_path: Path, language: str) -> None:
    evil = "<script>alert(1)</script>"
    before = run_with(tmp_path / "a", QUICK)
    after = run_with(tmp_path / "b", SLOW, **{"name: cnn-small": f'name: "{evil}"'})

    text = render_comparison(read_side(before), read_side(after), language=language)

    page = Outline(text)
    words = texts(language, "comparison")
    for key in ("config", "time", "parts", "layers", "collectives", "memory", "result", "loss_chart", "clear"):
        assert words[key] in page.text, key
    assert page.count("script") == 1
    assert evil in page.text
    assert not re.findall(r"(?:src|href)=|url\(|https?://", text)
    assert f'<html lang="{language}">' in text


def test_both_languages_have_the_same_texts_with_the_same_blanks() -> None:
    english, chinese = (texts(language, "comparison") for language in LANGUAGES)

    assert list(english) == list(chinese)
    for key, text in english.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", chinese[key])), key


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_command_prints_and_writes(tmp_path: Path, language: str) -> None:
    folders = [str(run_with(tmp_path / name, recipe)) for name, recipe in (("a", QUICK), ("b", SLOW))]
    page = tmp_path / "page.html"

    result = CliRunner().invoke(app, ["compare", *folders, "-o", str(page), "--language", language])

    assert result.exit_code == 0, result.output
    words = texts(language, "comparison")
    assert words["measure_step"] in result.output
    assert words["clear"] in result.output
    assert page.exists()


def test_json_has_figures_changes_and_verdicts(tmp_path: Path) -> None:
    folders = [str(run_with(tmp_path / name, recipe)) for name, recipe in (("a", QUICK), ("b", SLOW))]

    content = json.loads(CliRunner().invoke(app, ["compare", *folders, "--json"]).output)

    (step,) = [entry for entry in content["time"] if entry["kind"] == "step"]
    assert step["clear"] is True
    assert step["change"] == pytest.approx(step["after"]["value"] / step["before"]["value"] - 1)


def test_folders_that_hold_nothing_or_the_same_are_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="neither a run nor a profile"):
        read_side(tmp_path / "empty")

    result = CliRunner().invoke(app, ["compare", str(run), str(run)])

    assert isinstance(result.exception, RunFolderError)
    assert "both folders are the same" in str(result.exception)
