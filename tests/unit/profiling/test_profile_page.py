"""The pages of a profile: complete in both languages, escaped, small at any size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.contenders.generated_profile import Recipe, generate
from rich.console import Console
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.errors import ConfigError
from convmesh.profiling.analysis import analyse
from convmesh.profiling.events import EventBuilder, Trace
from convmesh.profiling.store import save_trace
from convmesh.report.profile_figures import slow_map, timeline
from convmesh.report.profile_page import render_profile
from convmesh.report.profile_terminal import print_profile
from convmesh.report.profile_text import LANGUAGES, texts


def test_both_languages_have_the_same_texts_with_the_same_blanks() -> None:
    english, chinese = (texts(language) for language in LANGUAGES)

    assert list(english) == list(chinese)
    for key, text in english.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", chinese[key])), key
    with pytest.raises(ConfigError, match="en or zh"):
        texts("fr")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_page_names_the_slow_rank_and_asks_the_network_for_nothing(language: str) -> None:
    recipe = Recipe(mesh={"data": 2, "channel": 2}, extra_compute={3: 0.2}, warmup=3.0, num_steps=12)

    page = render_profile(analyse(generate(recipe)), language=language)

    finding = texts(language)["straggler_compute"].split("{excess}")[0].format(ranks=3)
    assert finding in page
    assert not re.findall(r"(?:src|href)=|url\(|https?://", page)
    assert f'<html lang="{language}">' in page
    assert "NaN" not in page
    assert "nan ms" not in page


def test_texts_of_a_profile_are_escaped() -> None:
    builder = EventBuilder(0)
    for step in range(3):
        builder.add("compute", "<script>alert(1)</script>", start=step, end=step + 0.5)
        builder.add_step(step, start=step, end=step + 1)

    page = render_profile(analyse(Trace(ranks=(builder.build(),), source="<b>", remarks=("<i>",))))

    assert "<script>alert" not in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_a_large_profile_shows_the_slow_rank_and_stays_small() -> None:
    recipe = Recipe(mesh={"data": 100, "channel": 2}, num_steps=30, num_layers=4, extra_compute={77: 0.2})
    analysis = analyse(generate(recipe), one_clock=True)

    drawn, slow = timeline(analysis), slow_map(analysis, texts("en"))

    assert "77" in {row.label for row in drawn.rows}
    assert len(drawn.rows) + drawn.num_left_out == 200
    assert slow is not None
    assert any("76-79" in cell.text or "77" in cell.text for cell in slow.cells)
    assert len(render_profile(analysis)) < 1_000_000


def test_a_timeline_covers_the_step_in_the_colours_of_its_parts() -> None:
    (row, _) = timeline(analyse(generate(Recipe(num_layers=1)))).rows

    assert [bar.kind for bar in row.bars] == ["data", "communication", "compute", "optimizer"]
    assert sum(bar.width for bar in row.bars) == pytest.approx(1112 - 62, abs=1)


def test_a_terminal_gets_a_line_per_rank_and_what_stands_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(analyse(generate(Recipe(mesh={"data": 20}, extra_data={4: 0.3}))), Console(width=80))

    said = capsys.readouterr().out
    assert "4 more ranks" in said
    assert "Rank 4 waits 300 ms longer for its data" in said
    assert max(len(line) for line in said.splitlines()) <= 80


def test_a_terminal_shows_the_slow_one_of_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(analyse(generate(Recipe(mesh={"data": 40}, extra_compute={33: 0.3}))), Console(width=80))

    bars = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "###" in line]
    assert bars == [*map(str, range(15)), "33"]


def test_the_command_shows_a_stored_profile_and_writes_its_page(tmp_path: Path) -> None:
    save_trace(generate(Recipe(num_steps=6)), tmp_path / "run" / "profile")

    result = CliRunner().invoke(app, ["profile", "show", str(tmp_path / "run"), "--json", "--language", "zh"])

    assert result.exit_code == 0
    assert json.loads(result.output)["num_steps"] == 6
    assert (tmp_path / "run" / "profile" / "profile.html").exists()
    assert json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]


def test_the_command_imports_and_keeps_what_it_read(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": 1000 * step, "dur": 1000, "pid": 1}
        for step in range(2)
    ] + [{"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "ts": 100, "dur": 500, "pid": 1}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))

    result = CliRunner().invoke(app, ["profile", "import", str(tmp_path / "trace.json"), "-o", str(tmp_path / "out")])

    assert result.exit_code == 0, result.output
    assert {"profile.json", "profile.html", "trace.json", "rank_00000.npz"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    assert "aten::conv2d" in result.output


@pytest.mark.parametrize("command", [("profile",), ("profile", "show")])
def test_advice_never_replaces_a_file_that_is_there(tmp_path: Path, command: tuple[str, ...]) -> None:
    own = tmp_path / "run.yaml"
    own.write_text("engine: torch  # by hand")
    for path, told in ((own, "is there already"), (tmp_path / "no" / "x.yaml", "can't be written")):
        result = CliRunner().invoke(app, [*command, str(own), "--advice-config", str(path)])
        assert isinstance(result.exception, ConfigError)
        assert told in str(result.exception)
    assert own.read_text() == "engine: torch  # by hand"
