"""Advice in words: complete in both languages, on the terminal, in the page and as JSON."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from rich.console import Console

from convmesh.errors import ConfigError
from convmesh.profiling.advice import KINDS, Advice, Advised, Note, changes_as_yaml
from convmesh.profiling.analysis import analyse
from convmesh.profiling.events import EventBuilder, Trace
from convmesh.report.advice_view import advice_context, print_advice, view_of
from convmesh.report.profile_page import render_profile
from convmesh.report.profile_text import LANGUAGES, texts


def test_changes_are_written_as_a_run_file_has_them() -> None:
    changes = {"strategy.bucket_bytes": "25MiB", "strategy.accumulation": 2, "data.num_workers": 4}

    assert changes_as_yaml(changes) == "strategy: {bucket_bytes: 25MiB, accumulation: 2}\ndata: {num_workers: 4}"


def _sample() -> Advised:
    seen = {
        "number": 47.0, "bytes": "1 KiB", "seconds": 0.001, "samples": 2, "wanted": "on", "share": 0.25,
        "sampler": "random", "mesh": "data=2",
    }  # fmt: skip
    pieces = tuple(
        Advice(kind=kind, seen=seen, changes={"data.num_workers": 1}, seconds=0.2, predicted_seconds=0.1,
               notes=get_args(Note))
        for kind in KINDS
    )  # fmt: skip
    return Advised(
        seconds=0.2, pieces=pieces, together=KINDS[:3], predicted_seconds=0.08, basis={"devices": "<two> cores"}
    )


def test_both_languages_have_words_for_everything_with_the_same_blanks() -> None:
    english, chinese = (texts(language, "advice") for language in LANGUAGES)

    assert list(english) == list(chinese)
    for key, text in english.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", chinese[key])), key
    for language in LANGUAGES:
        view = view_of(_sample(), language=language, folder="runs/one")
        assert len(view.cards) == len(KINDS)
        words = " ".join((view.together, view.apply, *(f"{card.seen} {card.predicted}" for card in view.cards)))
        assert "{" not in words
        assert "runs/one" in view.apply
    with pytest.raises(ConfigError, match="en or zh"):
        view_of(_sample(), language="fr")


@pytest.mark.parametrize("language", LANGUAGES)
def test_terminal_and_page_show_what_to_change_and_what_it_gives(language: str) -> None:
    builder = EventBuilder(0)
    for step in range(5):
        builder.add_step(step, start=step, end=step + 1)
    analysis = analyse(Trace(ranks=(builder.build(),), source="made up"))
    console = Console(record=True, width=200)

    print_advice(_sample(), console, language=language)
    page = render_profile(analysis, language=language, advice=advice_context(_sample(), language=language))

    said = console.export_text()
    assert "data: {num_workers: 1}" in said
    assert "2.00" in said
    assert "data: {num_workers: 1}" in page
    assert "&lt;two&gt; cores" in page
    assert "--advice-config" in page


def test_json_holds_every_figure() -> None:
    told = _sample().as_dict()

    assert [piece["kind"] for piece in told["pieces"]] == list(KINDS)
    assert told["pieces"][0]["gain"] == pytest.approx(0.5)
    assert told["together"]["gain"] == pytest.approx(0.6)
