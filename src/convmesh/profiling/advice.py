"""Advice: what was seen in a profile, what to change, and what the change is predicted to give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import yaml

Kind = Literal[
    "mesh", "placement", "buckets", "accumulation", "recomputation", "optimizer_sharding", "half_gradients",
    "workers", "sampling",
]  # fmt: skip
"""What a piece of advice changes."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Note = Literal["batch_norm", "rounding", "class_shares", "unmeasured"]
"""What else a change does: to batch-norm statistics, to the digits of gradients, to shares of classes; or that it rests
on constants of links that the run has not used."""

MIN_GAIN = 0.03
"""Less than this share of a step is not worth a word."""

MIN_GAIN_OF_MESH = 0.10
"""Another mesh or placement must promise more: predictions of whole plans err by several percent themselves."""

MIN_GAIN_OF_UNKNOWN = 0.25
"""And still more where it rests on links that neither the run nor a cluster file of the user has measured."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to change.

    Args:
        kind: What it is about.
        seen: What was measured, by name of the blank that it fills in the wording.
        changes: Setting of the run file, as ``a.b``, to its new value.
        seconds: Of a step now, measured.
        predicted_seconds: Of a step then.
        is_exact: Whether an update computes the same as before, but for the order of sums.
        notes: What else the change does.
        plan: A plan file that it needs, as text; empty if none.
    """

    kind: Kind
    seen: Mapping[str, float | str]
    changes: Mapping[str, Any]
    seconds: float
    predicted_seconds: float
    is_exact: bool = True
    notes: tuple[Note, ...] = ()
    plan: str = ""

    @property
    def gain(self) -> float:
        """Share of the step that is saved, from 0 to 1."""
        return 1 - self.predicted_seconds / self.seconds if self.seconds else 0.0

    @property
    def yaml(self) -> str:
        """The change as lines of a run file."""
        return changes_as_yaml(self.changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "kind": self.kind,
            "seen": dict(self.seen),
            "changes": dict(self.changes),
            "yaml": self.yaml,
            "predicted_seconds": self.predicted_seconds,
            "gain": self.gain,
            "is_exact": self.is_exact,
            "notes": list(self.notes),
            "plan": self.plan,
        }


@dataclass(frozen=True, kw_only=True)
class Advised:
    """All advice on a profile.

    Args:
        seconds: Of a step now, measured.
        pieces: What to change, the most worth first; each predicted on its own.
        together: Kinds of the pieces that are applied together: those that are exact and add to each other.
        changes: All their changes.
        plan: The plan file that they need together, as text; empty if none.
        predicted_seconds: Of a step with all of them.
        basis: Where the constants come from, by kind.
        silent: Why there is none, where nothing could be predicted; empty else.
    """

    seconds: float
    pieces: tuple[Advice, ...] = ()
    together: tuple[Kind, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    predicted_seconds: float = 0.0
    basis: Mapping[str, str] = field(default_factory=dict)
    silent: str = ""

    @property
    def gain(self) -> float:
        """Share of the step that all together save, from 0 to 1."""
        return 1 - self.predicted_seconds / self.seconds if self.together and self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "step_seconds": self.seconds,
            "pieces": [piece.as_dict() for piece in self.pieces],
            "together": {
                "kinds": list(self.together),
                "changes": dict(self.changes),
                "predicted_seconds": self.predicted_seconds if self.together else self.seconds,
                "gain": self.gain,
            },
            "basis": dict(self.basis),
            "silent": self.silent,
        }


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    found: dict[str, Any] = {}
    for path, value in changes.items():
        *sections, name = path.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found


def changes_as_yaml(changes: Mapping[str, Any]) -> str:
    """Changes as they stand in a run file, a line per section: ``data: {num_workers: 2}``."""
    lines = [
        f"{section}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()}"
        for section, value in nested(changes).items()
    ]
    return "\n".join(lines)
