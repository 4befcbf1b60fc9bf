"""Advice in words, in English or Chinese: for the terminal, and as what a page's template needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from convmesh.profiling.advice import MIN_GAIN, Advice, Advised, Kind
from convmesh.report.profile_figures import milliseconds
from convmesh.report.profile_text import texts
from convmesh.report.scales import format_number


@dataclass(frozen=True)
class Card:
    """A piece of advice in words.

    Args:
        title: What to do, in short.
        seen: What was measured.
        yaml: What to change, as lines of the run file.
        predicted: What that is predicted to give.
        notes: What else it does.
    """

    title: str
    seen: str
    yaml: str
    predicted: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class View:
    """All advice in words.

    Args:
        title: Of the section.
        cards: The pieces, the most worth first.
        sentence: What stands there where there is none.
        together: What all give that are applied together, and how to apply them; empty if there is none.
        apply: The command that writes the run file.
        basis: Where predictions come from.
    """

    title: str
    cards: tuple[Card, ...]
    sentence: str
    together: str
    apply: str
    basis: str


def view_of(advised: Advised, *, language: str, folder: str = "RUN") -> View:
    """Puts advice into words.

    Args:
        advised: The advice.
        language: ``"en"`` or ``"zh"``.
        folder: The folder of the profile, for the command that applies it.

    Returns:
        The words.

    Raises:
        ConfigError: If the language is unknown.
    """
    words = texts(language, "advice")
    sentence = words["none"].format(floor=f"{100 * MIN_GAIN:g}")
    if advised.silent:
        sentence = words["silent"].format(reason=advised.silent.strip())
    together = apply = ""
    if advised.together:
        kinds = words["separator"].join(_title(words, _piece(advised, kind)) for kind in advised.together)
        step = _step(words, advised.seconds, advised.predicted_seconds)
        together = words["together_kinds"].format(kinds=kinds, step=step)
        apply = words["apply"].format(folder=folder)
    return View(
        title=words["title"],
        cards=tuple(_card(words, piece) for piece in advised.pieces),
        sentence="" if advised.pieces else sentence,
        together=together,
        apply=apply,
        basis=words["basis"].format(devices=advised.basis.get("devices", "")) if advised.basis else "",
    )


def print_advice(advised: Advised, console: Console, *, language: str = "en", folder: str = "RUN") -> None:
    """Prints advice.

    Args:
        advised: The advice.
        console: Where to.
        language: ``"en"`` or ``"zh"``.
        folder: The folder of the profile, for the command that applies it.

    Raises:
        ConfigError: If the language is unknown.
    """
    view, words = view_of(advised, language=language, folder=folder), texts(language, "advice")
    console.print(f"\n[bold]{view.title}[/bold]")
    if view.sentence:
        console.print(escape(view.sentence), highlight=False)
    for number, card in enumerate(view.cards, 1):
        heading = words["heading"].format(title=f"[bold]{escape(card.title)}[/bold]", step=escape(card.predicted))
        console.print(f"{number}. {heading}", highlight=False)
        for line in (card.seen, *card.notes):
            console.print(f"   {escape(line)}", highlight=False)
        for line in card.yaml.splitlines():
            console.print(f"     {escape(line)}", highlight=False, style="cyan", soft_wrap=True)
    if view.together:
        heading = words["heading"].format(title=f"[bold]{words['together']}[/bold]", step=escape(view.together))
        console.print(heading, highlight=False)
        console.print(escape(view.apply), highlight=False, soft_wrap=True)


def advice_context(advised: Advised | None, *, language: str, folder: str = "RUN") -> dict[str, Any] | None:
    """What the template of advice needs; None where nobody was asked for any."""
    if advised is None:
        return None
    return {"view": view_of(advised, language=language, folder=folder), "words": texts(language, "advice")}


def _card(words: Mapping[str, str], piece: Advice) -> Card:
    return Card(
        title=_title(words, piece),
        seen=words[f"seen_{piece.kind}"].format(**_figures(piece.seen)),
        yaml=piece.yaml,
        predicted=_step(words, piece.seconds, piece.predicted_seconds),
        notes=tuple(words[f"note_{note}"] for note in piece.notes),
    )


def _title(words: Mapping[str, str], piece: Advice) -> str:
    if piece.kind == "optimizer_sharding" and piece.seen.get("wanted") == "off":
        return words["do_optimizer_unsharding"]
    return words[f"do_{piece.kind}"]


def _piece(advised: Advised, kind: Kind) -> Advice:
    return next(piece for piece in advised.pieces if piece.kind == kind)


def _step(words: Mapping[str, str], now: float, then: float) -> str:
    return words["step"].format(
        now=milliseconds(now),
        then=milliseconds(then),
        gain=f"{100 * (1 - then / now):.0f}",
        speedup=f"{now / then:.2f}",
    )


def _figures(seen: Mapping[str, float | str]) -> dict[str, str]:
    """Each figure as it is read: seconds in milliseconds, shares in percent."""
    found = {}
    for name, value in seen.items():
        if isinstance(value, str):
            found[name] = value
        elif name == "seconds":
            found["milliseconds"] = milliseconds(value)
        elif name == "share":
            found[name] = f"{100 * value:.0f}"
        else:
            found[name] = format_number(float(f"{value:.3g}"))
    return found
