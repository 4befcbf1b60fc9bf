"""What a profile's report says in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.profiling.analysis import Analysis
from convmesh.profiling.stragglers import Straggler
from convmesh.profiling.tables import CollectiveRow
from convmesh.profiling.traffic import Traffic
from convmesh.report.achieved import Achieved
from convmesh.report.profile_figures import milliseconds
from convmesh.report.scales import format_number
from convmesh.units import format_bytes

_MAX_LAYERS = 25
_MIN_DRIFT = 0.1


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class LayerLine:
    """A line of the table of layers; ``share`` of the largest, from 0 to 1."""

    name: str
    kind: str
    kind_label: str
    milliseconds: str
    events: str
    share: float


def tiles(analysis: Analysis, words: Mapping[str, str]) -> list[Tile]:
    """The headline numbers: step, compute, communication, data, idle."""
    steady, spread = analysis.steady, analysis.spread
    step = float(steady.step_RS.mean()) or 1.0

    def share(seconds: float) -> str:
        return f"{100 * max(seconds, 0.0) / step:.1f}"

    def tile(label: str, seconds: float, detail: str) -> Tile:
        return Tile(words[label], f"{milliseconds(seconds)} ms", detail)

    compute, exposed, data, idle = (
        float(getattr(steady, f"{part}_RS").mean()) for part in ("compute", "exposed", "data", "idle")
    )
    of_step = words["of_step"]
    hidden = words["hidden"].format(hidden=milliseconds(float(steady.hidden_RS.mean())))
    exposed_detail = words["exposed_detail"].format(
        share=share(exposed), waiting=milliseconds(min(exposed, float(analysis.steady_waiting.mean())))
    )
    step_detail = words["step_detail"].format(p5=milliseconds(spread.p5_seconds), p95=milliseconds(spread.p95_seconds))
    return [
        tile("step_time", spread.median_seconds, step_detail),
        tile("compute", compute, of_step.format(share=share(compute))),
        tile("communication", exposed, f"{exposed_detail}; {hidden}"),
        tile("data", data, of_step.format(share=share(data))),
        tile("idle", idle, of_step.format(share=share(idle))),
    ]


def findings(analysis: Analysis, words: Mapping[str, str]) -> list[str]:
    """Sentences on what stands out, the costliest first; one sentence if nothing does."""
    found = [straggler_sentence(straggler, words) for straggler in analysis.stragglers[:12]]
    if not found and len(analysis.ranks) > 1:
        found.append(words["nothing"])
    found += [traffic_sentence(row, words) for row in analysis.traffic if row.is_latency_bound]
    if len(analysis.warmup_S):
        found.append(words["warmup"].format(number=len(analysis.warmup_S)))
    drift = analysis.spread.drift
    if abs(drift) > _MIN_DRIFT:
        direction = words["longer"] if drift > 0 else words["less"]
        found.append(words["drift"].format(share=f"{100 * abs(drift):.0f}", direction=direction))
    if analysis.num_skipped_updates:
        found.append(words["skipped"].format(number=analysis.num_skipped_updates))
    if analysis.num_unmatched_steps:
        found.append(words["unmatched"].format(number=analysis.num_unmatched_steps))
    return [*found, *analysis.trace.remarks]


def straggler_sentence(straggler: Straggler, words: Mapping[str, str]) -> str:
    """One sentence on slow ranks."""
    sentence = words[f"straggler_{straggler.phase}"].format(
        ranks=", ".join(str(rank) for rank in straggler.ranks),
        excess=milliseconds(straggler.excess_seconds),
        share=f"{100 * straggler.share_of_step:.0f}",
        steps=f"{100 * straggler.share_of_steps:.0f}",
    )
    return f"{sentence} ({straggler.cause})" if straggler.cause else sentence


def traffic_sentence(row: Traffic, words: Mapping[str, str]) -> str:
    """One sentence on an axis with many small collectives."""
    return words["latency"].format(
        axis=row.axis or "-",
        number=format_number(float(f"{row.num_per_step:.3g}")),
        bytes=format_bytes(row.median_bytes),
        fixed=milliseconds(row.fixed_seconds or 0.0),
        latency=f"{100 * row.latency_share:.0f}",
        share=f"{100 * row.exposed_share:.0f}",
    )


def collective_lines(
    analysis: Analysis, achieved: Mapping[CollectiveRow, Achieved] | None = None
) -> list[tuple[str, ...]]:
    """Lines of the table of collectives: name, axis with ranks of a group, number, bytes, times in ms, bandwidth.

    Args:
        analysis: The profile.
        achieved: What collectives reached of what a cluster file promises; then two columns tell it.

    Returns:
        One line per collective, the costliest first.
    """
    return [
        (
            row.name,
            f"{row.axis or '-'} ({row.num_ranks})",
            format_number(float(f"{row.num_per_step:.3g}")),
            format_bytes(row.num_bytes) if row.num_bytes else "-",
            milliseconds(row.transfer_seconds),
            milliseconds(row.waiting_seconds),
            f"{format_bytes(row.bytes_per_second)}/s" if row.bytes_per_second else "-",
            *(() if achieved is None else _reached(achieved.get(row))),
        )
        for row in analysis.collectives
    ]


def _reached(entry: Achieved | None) -> tuple[str, str]:
    if entry is None:
        return "-", "-"
    return f"{format_bytes(entry.cluster_bytes_per_second)}/s", f"{100 * entry.share:.0f} %"


def layer_lines(analysis: Analysis, words: Mapping[str, str]) -> list[LayerLine]:
    """Lines of the table of layers, the costliest first."""
    rows = analysis.layers[:_MAX_LAYERS]
    largest = max((row.exposed_seconds for row in rows), default=0.0) or 1.0
    return [
        LayerLine(
            row.name,
            row.kind,
            words[f"kind_{row.kind}"],
            milliseconds(row.exposed_seconds),
            format_number(float(f"{row.num_events:.3g}")),
            round(row.exposed_seconds / largest, 3),
        )
        for row in rows
    ]
