"""Ranks that keep the others waiting, found by what each rank does on its own.

In a step that ends with a collective all ranks take equally long: whoever is slow, the others wait for it there. So
whole times never name the slow rank; its own computing, its own waiting for data and its own idling do. Each is
compared with the lower median of all ranks in the same step.

A rank stands out for being slower than the others, not for being slow now and then as all are: its excess must be well
above that of the lower median rank, and above its own deviation from step to step.

Legend: R ranks, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from convmesh.profiling.breakdown import Breakdown
from convmesh.profiling.events import Floats
from convmesh.profiling.matching import Matched

Phase = Literal["compute", "data", "idle", "communication"]

MIN_SHARE = 0.05
"""Excess below this share of a step is not worth a word."""

NOISE_FACTOR = 3.0
"""A rank stands out if its typical excess is this many times the typical deviation between steps."""

MIN_STEPS = 4
"""With fewer steps nobody can tell a slow rank from chance."""

UNEVEN = 0.2
"""An excess that deviates by this share of itself from step to step comes and goes with something, as with samples."""

SLOW_GROUP_FACTOR = 1.5
"""A group stands out if moving a byte takes it this many times what it takes the other groups of its axis."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Ranks that take longer than the others.

    Args:
        ranks: One rank, or the group of a slow collective.
        phase: What takes longer.
        excess_seconds: By how much, in a typical step.
        share_of_step: The same as a share of the step.
        share_of_steps: In which share of the steps it takes longer than the limit.
        cause: What explains it, as far as the events tell; empty if nothing does.
    """

    ranks: tuple[int, ...]
    phase: Phase
    excess_seconds: float
    share_of_step: float
    share_of_steps: float
    cause: str = ""


def excess_over_ranks(value_RS: Floats) -> Floats:
    """How much more each rank has than the lower median of all ranks in the same step, shape (R, S)."""
    return value_RS - lower_median(value_RS)


def lower_median(value_RS: Floats) -> Floats:
    """The lower median of all ranks in each step, shape (S,)."""
    base: Floats = np.sort(value_RS, axis=0)[(len(value_RS) - 1) // 2]
    return base


def find_stragglers(breakdown: Breakdown, ranks: tuple[int, ...], matched: list[Matched]) -> list[Straggler]:
    """Names the ranks that keep others waiting, and with what.

    Args:
        breakdown: Of the steady steps.
        ranks: Number of each of its rows.
        matched: The collectives of all groups, on one clock.

    Returns:
        Stragglers, the costliest first; none for a single rank or fewer than ``MIN_STEPS`` steps.
    """
    if len(ranks) < 2 or len(breakdown.step_S) < MIN_STEPS:
        return []
    step = float(np.median(breakdown.step_RS))
    found = []
    # A rank that idles because it waits in a way that nobody recorded is not slow: on the whole it must be late.
    own_RS = breakdown.compute_RS + breakdown.data_RS + breakdown.idle_RS
    late_R = np.median(excess_over_ranks(own_RS), axis=1) > MIN_SHARE * step
    of_phase: dict[Phase, Floats] = {
        "compute": breakdown.compute_RS,
        "data": breakdown.data_RS,
        "idle": breakdown.idle_RS * late_R[:, None],
    }
    for phase, value_RS in of_phase.items():
        excess_RS = excess_over_ranks(value_RS)
        usual = float(np.sort(excess_RS.mean(axis=1))[(len(ranks) - 1) // 2])
        for row, rank in enumerate(ranks):
            straggler = _judge(rank, phase, excess_RS[row], usual=usual, step=step)
            if straggler is not None:
                found.append(_explained(straggler, breakdown, row))
    found += _slow_groups(matched, step=step)
    return sorted(found, key=lambda straggler: -straggler.excess_seconds * straggler.share_of_steps)


def _judge(rank: int, phase: Phase, excess_S: Floats, *, usual: float, step: float) -> Straggler | None:
    limit = MIN_SHARE * step
    typical = float(np.median(excess_S))
    noise = float(np.median(np.abs(excess_S - typical)))
    over_S = excess_S > limit
    always = typical > max(limit, NOISE_FACTOR * noise)
    # Rare but long: it costs as much on average as a rank that is always a little slow.
    rarely = float(excess_S[over_S].sum()) / len(excess_S) > 2 * limit and 0 < over_S.mean() <= 0.5
    if not (always or rarely) or float(excess_S.mean()) <= NOISE_FACTOR * max(usual, 0.0):
        return None
    excess = typical if always else float(np.median(excess_S[over_S]))
    return Straggler(
        ranks=(rank,),
        phase=phase,
        excess_seconds=excess,
        share_of_step=excess / step if step else 0.0,
        share_of_steps=float(over_S.mean()),
    )


def _explained(straggler: Straggler, breakdown: Breakdown, row: int) -> Straggler:
    """Adds the cause, as far as the samples of a rank explain that it takes longer."""
    samples_RS = breakdown.num_samples_RS
    if straggler.phase not in ("compute", "data") or not samples_RS.all():
        return straggler
    value_RS = breakdown.compute_RS if straggler.phase == "compute" else breakdown.data_RS
    mine = float(np.median(samples_RS[row]))
    others = float(np.median(lower_median(samples_RS.astype(float))))
    per_sample_RS = value_RS / samples_RS
    slower = float(np.median(per_sample_RS[row] / np.maximum(lower_median(per_sample_RS), 1e-12)))
    cause = ""
    if mine > others and slower < 1 + MIN_SHARE:
        cause = f"it has {mine:g} samples a step where others have {others:g}; a sample takes it no longer"
    elif mine == others:
        excess_S = excess_over_ranks(value_RS)[row]
        varies = float(excess_S.std() / excess_S.mean()) if excess_S.mean() > 0 else 0.0
        if varies > UNEVEN:
            cause = (
                f"as many samples as others have, and the excess varies by {100 * varies:.0f} % from step to step: "
                "its samples cost more, or something else runs beside it"
            )
    return replace(straggler, cause=cause) if cause else straggler


def _slow_groups(matched: list[Matched], *, step: float) -> list[Straggler]:
    found = []
    for axis in sorted({group.axis for group in matched}):
        groups = [group for group in matched if group.axis == axis and len(group.step_C)]
        if len(groups) < 2:
            continue
        per_step = [float(group.transfer_seconds.sum()) / len(np.unique(group.step_C)) for group in groups]
        base = sorted(per_step)[(len(per_step) - 1) // 2]
        for group, seconds in zip(groups, per_step, strict=True):
            if seconds > SLOW_GROUP_FACTOR * base and seconds - base > MIN_SHARE * step:
                excess = seconds - base
                found.append(
                    Straggler(
                        ranks=group.ranks,
                        phase="communication",
                        excess_seconds=excess,
                        share_of_step=excess / step if step else 0.0,
                        share_of_steps=1.0,
                        cause=f"moving the same bytes over the axis '{axis}' takes other groups {base:.3g} s a step",
                    )
                )
    return found
