"""The report of a run with a profile and a plan: one page, both languages, predictions against measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.contenders.generated_profile import Recipe, generate
from fake_runs import FakeRun, fake_summary, write_fake_run
from planning import cluster_of, plain_network
from test_report_page import Outline
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.config import dump_config, load_config
from convmesh.config.load import with_settings
from convmesh.errors import DataError, ProfileError
from convmesh.mesh import Mesh
from convmesh.plan import Execution, Foretold, Plan, resolve
from convmesh.plan.load import dump_plan
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Candidate
from convmesh.profiling.analysis import analyse
from convmesh.profiling.store import save_trace
from convmesh.report import foretelling
from convmesh.report.foretold import compare_with_run
from convmesh.report.html import language_of, read_report, write_report
from convmesh.report.profile_text import LANGUAGES, texts
from convmesh.report.run_folder import read_run
from convmesh.training.run_folder import RunFolder

RECIPE = Recipe(compute=0.4, data=0.02, transfer=0.01, update=0.03, num_layers=4, num_steps=6)
FORETOLD = Foretold(
    cluster="two cores",
    global_batch=64,
    seconds=0.45,
    seconds_by_kind={"forward": 0.1, "backward": 0.2, "communication, data": 0.06, "optimizer": 0.06, "overhead": 0.03},
    memory_bytes=2**30,
    memory_by_kind={"fixed": 2**29, "parameters": 2**28, "activations": 2**27, "passing": 2**26, "spare": 2**26},
    memory_limit_bytes=2**31,
    reasons=("data=2: the fastest that fits",),
)


def profiled_run(run_dir: Path, *, foretold: Foretold | None = FORETOLD) -> Path:
    write_fake_run(run_dir, FakeRun())
    save_trace(generate(RECIPE), run_dir / "profile")
    plan = Plan(mesh=Mesh({"data": 2}), execution=Execution(accumulation=2), foretold=foretold)
    (run_dir / "plan.yaml").write_text(dump_plan(plan))
    return run_dir


def page_of(run_dir: Path, **options: object) -> Outline:
    return Outline(write_report(run_dir, **options).read_text("utf-8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("language", LANGUAGES)
def test_one_page_has_curves_profile_and_plan(tmp_path: Path, language: str) -> None:
    page = page_of(profiled_run(tmp_path), language=language)

    words, profile_words = texts(language, "report"), texts(language)
    for key in ("training", "throughput", "plan", "predicted", "measured", "class_balance", "reasons", "row_memory"):
        assert words[key] in page.text, key
    for key in ("findings", "timeline", "division", "axis_chart", "slow_map", "by_axis", "layers", "step_chart"):
        assert profile_words[key] in page.text or key == "slow_map", key
    assert "data=2: the fastest that fits" in page.text
    assert "two cores" in page.text
    assert (tmp_path / "profile" / "trace.json").exists()
    assert page.tags[[tag for tag, _ in page.tags].index("html")][1]["lang"] == language


def test_the_run_file_sets_the_language_and_the_command_overrules_it(tmp_path: Path) -> None:
    run_dir = profiled_run(tmp_path)
    assert language_of(run_dir) == "en"
    config = RunFolder(run_dir).config
    config.write_text(dump_config(with_settings(load_config(config), {"report.language": "zh"})))

    def language(page: Path) -> str | None:
        tags = Outline(page.read_text("utf-8")).tags
        return tags[[tag for tag, _ in tags].index("html")][1]["lang"]

    assert language(write_report(run_dir)) == "zh"
    for command, page in (("report", "report.html"), ("profile show", "profile/profile.html")):
        for options, expected in (((), "zh"), (("--language", "en"), "en")):
            result = CliRunner().invoke(app, [*command.split(), str(run_dir), *options])
            assert result.exit_code == 0, result.output
            assert language(run_dir / page) == expected, command
    assert CliRunner().invoke(app, ["profile", "show", str(run_dir / "profile")]).exit_code == 0
    assert language(run_dir / "profile" / "profile.html") == "zh"
    # A run file that can't be read keeps nobody from the report.
    config.write_text("engine: nothing\n")
    assert language_of(run_dir) == "en"


def test_a_chinese_page_has_no_english_sentence(tmp_path: Path) -> None:
    page = page_of(profiled_run(tmp_path), language="zh")

    english = {**texts("en", "report"), **texts("en")}
    chinese = " ".join([*texts("zh", "report").values(), *texts("zh").values()])
    for key, text in english.items():
        longest = max(re.split(r"{\w+}", text), key=len).strip()
        if len(longest) > 9 and longest not in chinese:
            assert longest not in page.text, key


def test_reports_have_the_same_texts_with_the_same_blanks_in_both_languages() -> None:
    english, chinese = (texts(language, "report") for language in LANGUAGES)

    assert list(english) == list(chinese)
    for key, text in english.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", chinese[key])), key


def test_predictions_stand_beside_what_the_profile_measured(tmp_path: Path) -> None:
    run_dir = profiled_run(tmp_path)
    compared = compare_with_run(FORETOLD, read_run(run_dir), analyse(generate(RECIPE)))

    found = {(entry.kind, entry.axis): (entry.predicted, entry.measured) for entry in compared}
    assert found["step", ""] == pytest.approx((0.45, 0.49))
    assert found["compute", ""] == pytest.approx((0.3, 0.4))
    assert found["optimizer", ""] == pytest.approx((0.06, 0.03))
    assert found["communication", "data"] == pytest.approx((0.06, 0.04))
    assert found["data", ""] == pytest.approx((0.0, 0.02))
    assert found["overhead", ""] == pytest.approx((0.03, 0.0), abs=1e-9)
    assert found["memory", ""] == (2**30, max(fake_summary(FakeRun())["peak_memory_bytes"]))
    rows = read_report(run_dir).plan("en").rows
    assert ("Forward and backward", "300 ms", "400 ms", "-25 %") in rows
    assert ("Waiting for data", "0 ms", "20 ms", "–") in rows


def test_without_a_profile_predictions_meet_the_metrics_and_a_hint_tells_how_to_get_one(tmp_path: Path) -> None:
    run_dir = profiled_run(tmp_path)
    for file in (run_dir / "profile").iterdir():
        file.unlink()

    page = page_of(run_dir)

    assert "convmesh profile CONFIG" in page.text
    assert "a profile would tell their parts" in page.text
    assert {entry.kind for entry in compare_with_run(FORETOLD, read_run(run_dir), None)} == {"step", "data", "memory"}
    assert "One step on all ranks" not in page.text


def test_a_damaged_profile_or_plan_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = profiled_run(tmp_path)
    (run_dir / "profile" / "rank_00001.npz").write_bytes(b"damaged")
    (run_dir / "plan.yaml").write_text("schema_version: 1\nmesh: {data: two}\n")

    page = page_of(run_dir)

    assert "rank_00001.npz' is damaged" in page.text
    assert "The plan of this run can't be read" in page.text
    assert "Class balance" in page.text


def test_a_profile_of_another_run_may_be_shown(tmp_path: Path) -> None:
    write_fake_run(tmp_path / "run", FakeRun())
    save_trace(generate(RECIPE), tmp_path / "other" / "profile")

    page = page_of(tmp_path / "run", profile_dir=tmp_path / "other")

    assert "The profile is of another run" in page.text
    assert "One step on all ranks" in page.text
    with pytest.raises(ProfileError, match="holds no profile"):
        write_report(tmp_path / "run", profile_dir=tmp_path)


def test_any_run_is_predicted_from_a_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = plain_network(), cluster_of(ranks_per_node=2)
    monkeypatch.setattr(foretelling, "cached_graph", lambda run, *, batch: graph)
    run_dir = write_fake_run(tmp_path, FakeRun())
    save_trace(generate(RECIPE), run_dir / "profile")

    plan = foretelling.foretell(read_run(run_dir), cluster)

    config = load_config(run_dir / "config.yaml")
    expected = predict(Candidate.of(resolve(graph, Plan(mesh=Mesh({"data": 2}))), config), cluster)
    assert plan.foretold is not None
    assert plan.mesh.sizes == {"data": 2}
    assert plan.foretold.seconds == pytest.approx(expected.seconds.total)
    assert sum(plan.foretold.seconds_by_kind.values()) == pytest.approx(plan.foretold.seconds)
    assert plan.foretold.memory_bytes == sum(plan.foretold.memory_by_kind.values())
    rows = {row[0]: row for row in read_report(run_dir).plan("en", cluster).rows}
    assert rows["Update"][2] == "490 ms"
    assert "by rule" not in " ".join(read_report(run_dir).plan("en", cluster).remarks)


def test_a_run_that_cannot_be_predicted_says_why_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: object, *, batch: int) -> None:
        raise DataError("the data is gone", fix="Give --image-shape")

    monkeypatch.setattr(foretelling, "cached_graph", fail)
    planned = read_report(profiled_run(tmp_path / "planned")).plan("en", cluster_of(ranks_per_node=2))
    plain = read_report(write_fake_run(tmp_path / "plain", FakeRun())).plan("en", cluster_of(ranks_per_node=2))

    said = "The run can't be predicted from this cluster file: the data is gone"
    assert plain.remarks == (said,)
    assert planned.remarks[0] == said
    assert ("Forward and backward", "300 ms", "400 ms", "-25 %") in planned.rows  # As its own plan predicts.


def test_a_plan_for_another_batch_says_so(tmp_path: Path) -> None:
    run_dir = profiled_run(tmp_path)
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace("global_batch: 64", "global_batch: 128"))

    assert "The run has a global batch of 128" in page_of(run_dir).text


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_command_sums_up(tmp_path: Path, language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVMESH_DATA", str(tmp_path / "none"))  # So the network can't be read anew, whatever is here.
    run_dir = profiled_run(tmp_path)

    result = CliRunner().invoke(app, ["report", str(run_dir), "--language", language, "--cluster", "cpu-gloo"])

    assert result.exit_code == 0, result.output
    words = texts(language, "report")
    for text in ("59.31 %", words["status_finished"], words["row_compute"], "-25 %", texts(language)["promised"]):
        assert text in result.output
    assert str(run_dir / "report.html") in result.output
    assert texts(language)["promised"] in (run_dir / "report.html").read_text("utf-8")


def test_the_command_says_what_a_run_without_profile_lacks(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(write_fake_run(tmp_path, FakeRun(with_summary=False)))])

    assert result.exit_code == 0, result.output
    assert "unfinished" in result.output
    assert "convmesh profile CONFIG" in " ".join(result.output.split())
