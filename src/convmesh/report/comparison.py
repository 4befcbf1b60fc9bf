"""What changed from one run to another: in settings, plan, time, memory and result.

Two medians differ *clearly* if the middle halves of the values that they come from (from the lower to the upper
quartile) do not overlap; two accuracies if their 95 % intervals do not, for as many evaluated samples. That says that
steps of one run are slower than steps of the other; it can't say whether the machine was the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from convmesh.profiling.analysis import Analysis
from convmesh.profiling.tables import CollectiveRow
from convmesh.report.comparison_sides import Side, read_sides
from convmesh.report.run_folder import Record, RunData, number, numbers

LEAST_VALUES = 5
"""Of fewer values nobody can tell how much they vary."""

Unit = Literal["seconds", "bytes", "share", "number", "loss"]

_WHAT_MATTERS = {"data.source": "other_data", "train.global_batch": "other_batch", "engine": "other_engine"}
"""Settings whose difference changes what may be compared, to the remark that says so."""

_ALWAYS = ("step", "compute", "data", "idle")
"""Parts of a step that are told even where they take no time."""

_OF_COLLECTIVES: Mapping[str, Unit] = {"num_per_step": "number", "num_bytes": "bytes", "transfer_seconds": "seconds"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs.

    Args:
        key: Its dotted name.
        before: Its value in the first run; None where it has none.
        after: Its value in the second run; None where it has none.
    """

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A figure and how it varies.

    Args:
        value: The figure: a median where there are many values.
        low: Lower quartile, or lower end of the 95 % interval of a share; ``value`` where nothing is known of it.
        high: The upper one.
        num_values: Values that it comes from.
    """

    value: float
    low: float
    high: float
    num_values: int

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Sample | None:
        """The median of the values that are finite, and their quartiles; None if there is none."""
        array = np.asarray(values, float)
        array = array[np.isfinite(array)]
        if not len(array):
            return None
        low, value, high = (float(part) for part in np.percentile(array, (25, 50, 75)))
        return cls(value=value, low=low, high=high, num_values=len(array))


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure of both runs.

    Args:
        kind: What it is.
        of: The axis, layer or collective that it is of; empty for the whole.
        unit: Of its values.
        before: In the first run.
        after: In the second run.
    """

    kind: str
    of: str = ""
    unit: Unit = "seconds"
    before: Sample
    after: Sample

    @property
    def change(self) -> float:
        """How much larger the second is, as a share of the first; ``nan`` if the first is nothing."""
        return self.after.value / self.before.value - 1 if self.before.value else math.nan

    @property
    def clear(self) -> bool | None:
        """Whether the difference exceeds the spread; None where too little is known of the spread."""
        if min(self.before.num_values, self.after.num_values) < LEAST_VALUES:
            return None
        return self.before.high < self.after.low or self.after.high < self.before.low


@dataclass(frozen=True, kw_only=True)
class Remark:
    """What to know before comparing: the key of a text, and what fills it in."""

    key: str
    values: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs, held against each other.

    Args:
        names: What they are called.
        profiled: Whether times are those of two profiles; else they are those of the lines of metrics.
        remarks: What to know before comparing.
        config: Settings that differ.
        plan: What differs in their plans.
        versions: Versions and machine that differ.
        time: Seconds of a step and its parts, and images per second.
        layers: Layers and operations, the largest change first.
        collectives: Seconds, number and bytes of collectives per step.
        memory: Of the rank that has most.
        result: Loss and accuracy.
    """

    names: tuple[str, str]
    profiled: bool
    remarks: tuple[Remark, ...]
    config: tuple[Change, ...]
    plan: tuple[Change, ...]
    versions: tuple[Change, ...]
    time: tuple[Measure, ...]
    layers: tuple[Measure, ...]
    collectives: tuple[Measure, ...]
    memory: tuple[Measure, ...]
    result: tuple[Measure, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for other programs; figures that are not finite are None."""
        content = asdict(self)
        for name in ("time", "layers", "collectives", "memory", "result"):
            measures: Sequence[Measure] = getattr(self, name)
            for entry, measure in zip(content[name], measures, strict=True):
                entry["change"] = measure.change if math.isfinite(measure.change) else None
                entry["clear"] = measure.clear
        return content


def compare_runs(before: str | Path, after: str | Path) -> Comparison:
    """Holds two runs against each other.

    Args:
        before: The run folder of the first, or the folder of a profile.
        after: The same of the second.

    Returns:
        What differs.

    Raises:
        RunFolderError: If a folder holds neither a run nor a profile.
        ProfileError: If it holds a profile alone, and that is damaged.
    """
    return compare_sides(*read_sides(Path(before), Path(after)))


def compare_sides(before: Side, after: Side) -> Comparison:
    """Holds two runs against each other that were read already; see ``compare_runs``."""
    versions = [side.run.versions for side in (before, after)]
    pair = (before.analysis, after.analysis) if before.analysis and after.analysis else None
    return Comparison(
        names=(before.name, after.name),
        profiled=pair is not None,
        remarks=tuple(_remarks(before, after)),
        config=tuple(_changes(before.config, after.config)),
        plan=tuple(_changes(before.plan, after.plan)) if before.plan and after.plan else (),
        versions=tuple(_changes(*versions)) if all(versions) else (),
        time=tuple(_times(before, after)),
        layers=tuple(_layers(pair)) if pair else (),
        collectives=tuple(_collectives(pair)) if pair else (),
        memory=tuple(_memory(before, after)),
        result=tuple(_results(before.run, after.run)),
    )


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield Change(key=key, before=before.get(key), after=after.get(key))


def _remarks(before: Side, after: Side) -> Iterator[Remark]:
    for side in (before, after):
        if side.report.problem:
            yield Remark(key="broken_profile", values={"name": side.name, "reason": side.report.problem})
        elif side.analysis is None:
            yield Remark(key="no_profile", values={"name": side.name})
        if side.run.starts and not side.run.summary:
            yield Remark(key="unfinished", values={"name": side.name})
    plans = [bool(side.plan) for side in (before, after)]
    if any(plans) and not all(plans):
        yield Remark(key="one_plan", values={"name": (before if before.plan else after).name})
    if before.network and after.network and before.network != after.network:
        yield Remark(key="other_network", values={"before": before.network, "after": after.network})
    configs = before.config, after.config
    for key, remark in _WHAT_MATTERS.items():
        values = [config.get(key, "") for config in configs]
        if all(values) and values[0] != values[1]:
            yield Remark(key=remark, values={"before": values[0], "after": values[1]})
    if before.machine and after.machine and before.machine != after.machine:
        yield Remark(key="other_machine", values={})


def _times(before: Side, after: Side) -> Iterator[Measure]:
    if before.analysis is not None and after.analysis is not None:
        samples = [_profiled(analysis) for analysis in (before.analysis, after.analysis)]
    else:
        samples = [_logged(side.run.steps) for side in (before, after)]
    for key in dict.fromkeys([*samples[0], *samples[1]]):
        nothing = np.zeros(LEAST_VALUES) if key[0] == "communication" else ()
        pair = [Sample.of(found.get(key, nothing)) for found in samples]
        if pair[0] is not None and pair[1] is not None and (key[0] in _ALWAYS or any(one.high for one in pair if one)):
            unit: Unit = "number" if key[0] == "images_per_second" else "seconds"
            yield Measure(kind=key[0], of=key[1], unit=unit, before=pair[0], after=pair[1])


def _profiled(analysis: Analysis) -> dict[tuple[str, str], npt.ArrayLike]:
    """Figures of each steady step: of the slowest rank for the whole, of the average rank for its parts."""
    steady = analysis.steady
    slowest_S = steady.step_RS.max(axis=0)
    found: dict[tuple[str, str], npt.ArrayLike] = {("step", ""): slowest_S}
    samples_S = steady.num_samples_RS.sum(axis=0)
    if samples_S.all() and "stage" not in analysis.trace.mesh:
        mesh = analysis.trace.mesh
        copies = len(analysis.ranks) // mesh.get("data", 1) if mesh else 1
        found["images_per_second", ""] = samples_S / copies / slowest_S
    found["compute", ""] = steady.compute_RS.mean(axis=0)
    for place, axis in enumerate(steady.axes):
        found["communication", axis] = steady.exposed_ARS[place].mean(axis=0)
    found["waiting", ""] = analysis.steady_waiting.mean(axis=0)
    found["hidden", ""] = steady.hidden_RS.mean(axis=0)
    found["data", ""] = steady.data_RS.mean(axis=0)
    found["idle", ""] = steady.idle_RS.mean(axis=0)
    return found


def _logged(steps: Sequence[Record]) -> dict[tuple[str, str], npt.ArrayLike]:
    """Figures of each line of metrics but the first, which holds compilation and warm-up."""
    lines = steps[1:] if len(steps) > 1 else steps
    per_rank = {key: [numbers(step, f"{key}_seconds") for step in lines] for key in ("step", "data", "communication")}
    whole = [
        max((work + wait for work, wait in zip(works, waits, strict=False)), default=math.nan)
        for works, waits in zip(per_rank["step"], per_rank["data"], strict=True)
    ]
    return {
        ("step", ""): whole,
        ("images_per_second", ""): [number(step, "images_per_second") for step in lines],
        ("all_communication", ""): [_mean(values) for values in per_rank["communication"]],
        ("data", ""): [_mean(values) for values in per_rank["data"]],
    }


def _layers(sides: tuple[Analysis, Analysis]) -> list[Measure]:
    tables = [{(row.kind, row.name): row.exposed_seconds for row in side.layers} for side in sides]
    found = []
    for kind, name in dict.fromkeys([*tables[0], *tables[1]]):
        before, after = (_fixed(table.get((kind, name))) for table in tables)
        found.append(Measure(kind=kind, of=name, before=before, after=after))
    return sorted(found, key=lambda entry: -abs(entry.after.value - entry.before.value))


def _collectives(sides: tuple[Analysis, Analysis]) -> Iterator[Measure]:
    tables = [{_name(row): row for row in side.collectives} for side in sides]
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        for kind, unit in _OF_COLLECTIVES.items():
            rows = [table.get(name) for table in tables]
            before, after = (_fixed(None if row is None else getattr(row, kind)) for row in rows)
            yield Measure(kind=kind, of=name, unit=unit, before=before, after=after)


def _name(row: CollectiveRow) -> str:
    return f"{row.name}, {row.axis or '-'} ({row.num_ranks})"


def _memory(before: Side, after: Side) -> Iterator[Measure]:
    for key in ("peak_memory_bytes", "optimizer_bytes"):
        sizes = [[size for size in numbers(side.run.summary, key) if size > 0] for side in (before, after)]
        if all(sizes):
            yield Measure(kind=key, unit="bytes", before=_fixed(max(sizes[0])), after=_fixed(max(sizes[1])))
    peaks = [max(side.analysis.peak_memory_bytes, default=0) if side.analysis else 0 for side in (before, after)]
    if all(peaks):
        yield Measure(kind="profiled_memory", unit="bytes", before=_fixed(peaks[0]), after=_fixed(peaks[1]))


def _results(before: RunData, after: RunData) -> Iterator[Measure]:
    kinds: tuple[tuple[str, Unit], ...] = (("accuracy", "share"), ("best_accuracy", "share"), ("loss", "loss"))
    for kind, unit in kinds:
        pair = [_scored(run, kind) for run in (before, after)]
        if pair[0] is not None and pair[1] is not None:
            yield Measure(kind=kind, unit=unit, before=pair[0], after=pair[1])
    losses = [Sample.of([number(step, "loss") for step in _last_quarter(run.steps)]) for run in (before, after)]
    if losses[0] is not None and losses[1] is not None:
        yield Measure(kind="training_loss", unit="loss", before=losses[0], after=losses[1])
    for kind, unit in (("num_updates", "number"), ("images_per_second", "number"), ("seconds", "seconds")):
        values = [number(run.summary, kind) for run in (before, after)]
        if all(map(math.isfinite, values)):
            yield Measure(kind=f"run_{kind}", unit=unit, before=_fixed(values[0]), after=_fixed(values[1]))


def _scored(run: RunData, kind: str) -> Sample | None:
    """A score of the evaluation; an accuracy varies as that of so many samples drawn at random does."""
    value = number(run.summary, kind)
    last = run.evals[-1] if run.evals else {}
    if not math.isfinite(value):
        value = number(last, kind)
    if not math.isfinite(value):
        return None
    samples = number(last, "num_samples")
    if kind == "loss" or not (0 <= value <= 1 and samples > 0):
        return _fixed(value)
    # 95 % of such draws lie within 1.96 standard deviations of a binomial share.
    half = 1.96 * math.sqrt(value * (1 - value) / samples)
    return Sample(value=value, low=value - half, high=value + half, num_values=int(samples))


def _last_quarter(steps: Sequence[Record]) -> Sequence[Record]:
    return steps[-max(1, len(steps) // 4) :] if steps else ()


def _fixed(value: float | None) -> Sample:
    value = value or 0.0
    return Sample(value=value, low=value, high=value, num_values=1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
