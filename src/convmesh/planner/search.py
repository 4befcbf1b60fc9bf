"""The search for the plan that takes least time within the memory of each rank.

1. All outlines (`convmesh.planner.candidates`) are priced, and each one's best splits without a limit of memory found:
   a floor of its seconds.
2. From the lowest floor on, outlines are judged: the best splits that fit, by `convmesh.planner.predict`. Where they
   don't fit as they are, splits that take less memory and recomputation are tried, the latter for as few blocks as
   will do. What is kept beyond the floor of the bytes is carried over as a margin until the prediction fits.
3. It ends when no floor is below the best plan found. Plain data parallelism is judged first, so the plan is never
   slower than it. Meshes that leave ranks idle are tried last, and only if they could be faster.

Networks with few ways (``EXACT_WAYS``) are searched until the optimum of the cost model is proved, way by way in the
order of their floors. Nothing depends on chance or on time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from convmesh.mesh import Mesh
from convmesh.planner.assignment import Assignment, Problem
from convmesh.planner.candidates import Outline, Wishes, list_outlines
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Prediction
from convmesh.planner.pricing import Priced, Pricer
from convmesh.planner.tables import Floats
from convmesh.planner.ways import Way
from convmesh.units import format_bytes

EXACT_WAYS = 80
"""Ways of all operators together up to which the optimum is proved."""

_MOST_PROOFS = 500
_MOST_STEPS = 50_000
_MOST_MARGINS = 5
_CARE = 0.02
"""Floors are trusted to this share: where a curve bends, the straight line of `pricing` may lie above it."""

Verdict = Literal["chosen", "slower", "too large", "not tried"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One candidate.

    Args:
        outline: What it is.
        floor_seconds: What it would take at least, if memory had no limit.
        verdict: What became of it.
        reason: Why, in words.
        prediction: Of its best plan; of the one that needs least memory, if it is too large; None if not tried.
        is_proved: Whether its splits are the optimum of the cost model, and not only of its floor.
    """

    outline: Outline
    floor_seconds: float
    verdict: Verdict = "not tried"
    reason: str = ""
    prediction: Prediction | None = None
    is_proved: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a plan of it within the limit."""
        return self.verdict in {"chosen", "slower"}

    @property
    def seconds(self) -> float:
        """Of its plan; its floor if it has none."""
        return self.floor_seconds if self.prediction is None else self.prediction.seconds.total


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has found.

    Args:
        num_ranks: The ranks there are.
        memory_bytes: What each may fill.
        candidates: All candidates, the chosen one first, then from fast to slow, those that are too large last.
        refused: Meshes that can't be, and why.
    """

    num_ranks: int
    memory_bytes: int
    candidates: tuple[Judged, ...]
    refused: tuple[tuple[Mesh, str], ...] = ()

    @property
    def chosen(self) -> Judged | None:
        """The fastest that fits; None if nothing does."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.verdict == "chosen" else None

    @property
    def plain(self) -> Judged | None:
        """Plain data parallelism, if samples can be dealt so."""
        return next((entry for entry in self.candidates if entry.outline.is_plain and self._is_full(entry)), None)

    def _is_full(self, entry: Judged) -> bool:
        return entry.outline.mesh.num_ranks == self.num_ranks


def search(pricer: Pricer, *, num_ranks: int, memory_bytes: int | None = None, wishes: Wishes | None = None) -> Found:
    """Finds the best plan.

    Args:
        pricer: Network, training and devices.
        num_ranks: The ranks there are.
        memory_bytes: What each may fill; what a device of the cluster has, if left out.
        wishes: What is fixed beforehand.

    Returns:
        The plan and all other candidates with reasons.

    Raises:
        ConfigError: If the cluster says nothing of the links between so many ranks.
    """
    limit = pricer.model.cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    outlines = list_outlines(
        pricer.graph,
        global_batch=pricer.training.global_batch,
        num_ranks=num_ranks,
        wishes=wishes,
        has_blocks=bool(pricer.blocks),
    )
    judged = _Search(pricer, num_ranks, limit).run(outlines.found)
    return Found(num_ranks=num_ranks, memory_bytes=limit, candidates=judged, refused=outlines.refused)


@dataclass(frozen=True)
class _Case:
    """An outline to be judged.

    Args:
        outline: The outline.
        priced: Its price where nothing is recomputed.
        again_seconds: What recomputing all blocks costs besides, per way; None if nothing is recomputed.
        num_bytes: Floor of the bytes per way, all blocks being recomputed if the outline says so.
    """

    outline: Outline
    priced: Priced
    again_seconds: Floats | None
    num_bytes: Floats

    @property
    def objective(self) -> Floats:
        """Seconds of an update per way."""
        return self.priced.seconds if self.again_seconds is None else self.priced.seconds + self.again_seconds

    @property
    def problem(self) -> Problem:
        """Which ways fit together."""
        return self.priced.tables.problem

    @property
    def is_small(self) -> bool:
        """Whether the optimum can be proved."""
        return len(self.num_bytes) <= EXACT_WAYS


@dataclass(frozen=True)
class _Plan:
    """Ways that fit together, and what they are predicted to cost."""

    ways: dict[str, Way]
    prediction: Prediction


class _Search:
    """The best plan so far and the candidates that were looked at."""

    def __init__(self, pricer: Pricer, num_ranks: int, limit: int) -> None:
        self._pricer = pricer
        self._num_ranks = num_ranks
        self._limit = limit
        self._best = math.inf
        self._judged: dict[tuple[object, ...], Judged] = {}
        self._seconds_per_sample = math.inf

    def run(self, outlines: Sequence[Outline]) -> tuple[Judged, ...]:
        """Judges all outlines."""
        sizes = sorted({outline.mesh.num_ranks for outline in outlines}, reverse=True)
        for size in sizes:
            own = [outline for outline in outlines if outline.mesh.num_ranks == size]
            if size < self._num_ranks and self._work_floor(size) >= self._best:
                continue
            self._run_size(own)
        return self._sorted()

    def _work_floor(self, num_ranks: int) -> float:
        """Seconds of the work alone, if it could be dealt to so many ranks without loss."""
        return self._pricer.training.global_batch * self._seconds_per_sample / num_ranks

    def _run_size(self, outlines: Sequence[Outline]) -> None:
        priced = [(outline, self._pricer.price(outline)) for outline in outlines]
        for outline, price in priced:
            self._note_work(outline, price)
        # Recomputation only adds seconds, and as few blocks as will do may be none: its floor is that of none.
        order = sorted(priced, key=lambda pair: (not pair[0].is_plain, pair[1].floor_seconds))
        for outline, price in order:
            if price.free is not None:
                self._judged[outline.key] = self._judge(outline, price)
        self._show_each_mesh(order)

    def _show_each_mesh(self, order: Sequence[tuple[Outline, Priced]]) -> None:
        """Predicts the best of each mesh even if its floor is too high, so that people see what it would cost."""
        seen: set[str] = set()
        for outline, price in order:
            entry, mesh = self._judged.get(outline.key), str(outline.mesh)
            if entry is None or price.free is None or mesh in seen or outline.mesh.num_ranks < self._num_ranks:
                continue
            seen.add(mesh)
            if entry.verdict == "not tried" and not entry.reason:
                prediction = self._plan(self._case(outline, price), price.free).prediction
                if prediction.memory.total <= self._limit:
                    self._judged[outline.key] = dataclasses.replace(entry, verdict="slower", prediction=prediction)

    def _note_work(self, outline: Outline, priced: Priced) -> None:
        if outline.mesh.size("data") == outline.mesh.num_ranks:
            seconds = priced.operator_seconds * outline.mesh.num_ranks / self._pricer.training.global_batch
            self._seconds_per_sample = min(self._seconds_per_sample, seconds)

    def _judge(self, outline: Outline, priced: Priced) -> Judged:
        entry = Judged(outline=outline, floor_seconds=priced.floor_seconds)
        if priced.floor_seconds * (1 - _CARE) >= self._best and not outline.is_plain:
            return entry
        if outline.recompute != "none":
            without = self._judged.get(dataclasses.replace(outline, recompute="none").key)
            if without is not None and without.verdict == "slower" and without.seconds <= entry.seconds * (1 + _CARE):
                return dataclasses.replace(entry, reason="nothing needs to be recomputed: it fits without")
        case = self._case(outline, priced)
        plan, is_proved = self._best_plan(case)
        if plan is None:
            return self._too_large(case, entry)
        self._best = min(self._best, plan.prediction.seconds.total)
        return dataclasses.replace(entry, verdict="slower", prediction=plan.prediction, is_proved=is_proved)

    def _case(self, outline: Outline, priced: Priced) -> _Case:
        if outline.recompute == "none":
            return _Case(outline, priced, None, priced.num_bytes)
        return _Case(outline, priced, *self._pricer.recomputing(outline))

    def _best_plan(self, case: _Case) -> tuple[_Plan | None, bool]:
        """The fastest plan within the limit, as far as is known, and whether that is proved."""
        lightest = case.problem.solve(case.num_bytes)
        if lightest is None or lightest.cost + case.priced.fixed_bytes > self._limit:
            return None, False
        if case.again_seconds is not None:
            plan = self._within(case)
            return (None if plan is None else self._fewer_blocks(case, plan)), False
        if case.is_small:
            return self._proved(case)
        if case.priced.free is not None:
            plan = self._plan(case, case.priced.free)
            if plan.prediction.memory.total <= self._limit:
                return plan, False
        return self._within(case), False

    def _proved(self, case: _Case) -> tuple[_Plan | None, bool]:
        """Goes through all splits whose floor is below the best plan found."""
        best = self._within(case)

        def bound() -> float:
            if best is None:
                return math.inf
            return best.prediction.seconds.total * (1 - 1e-9) - case.priced.fixed_seconds

        limit = self._limit - case.priced.fixed_bytes
        for number, found in enumerate(
            case.problem.below(case.objective, loads=case.num_bytes, limit=limit, bound=bound, most_steps=_MOST_STEPS)
        ):
            if found is None or number == _MOST_PROOFS:
                return best, False
            plan = self._plan(case, found)
            fits = plan.prediction.memory.total <= self._limit
            if fits and (best is None or plan.prediction.seconds.total < best.prediction.seconds.total):
                best = plan
        return best, True

    def _within(self, case: _Case) -> _Plan | None:
        """The best splits whose prediction fits: as far as it lies above the floor, the limit is drawn in."""
        margin = 0.0
        # With one way each there is nothing to choose.
        for _ in range(_MOST_MARGINS if case.problem.has_choice else 1):
            found = self._below(case, self._limit - case.priced.fixed_bytes - margin)
            if found is None:
                break
            plan = self._plan(case, found)
            excess = plan.prediction.memory.total - self._limit
            if excess <= 0:
                return plan
            margin += excess
        lightest = self._lightest(case)
        return lightest if lightest is not None and lightest.prediction.memory.total <= self._limit else None

    @staticmethod
    def _below(case: _Case, limit: float) -> Assignment | None:
        """The best splits whose bytes are below a limit: exactly in a small network, else by a price of memory."""
        if case.is_small:
            return case.problem.solve(case.objective, loads=[case.num_bytes], limits=[limit])
        free = case.problem.solve(case.objective, loads=[case.num_bytes], limits=[math.inf])
        if free is None or free.loads[0] <= limit:
            return free
        return case.problem.at_a_price(case.objective, loads=case.num_bytes, limit=limit)

    def _fewer_blocks(self, case: _Case, plan: _Plan) -> _Plan:
        """The same splits with as few blocks recomputed as will do, the dearest spared first."""
        order = self._by_worth(case, plan)
        low, high, best = 0, len(order), plan
        while low < high:
            middle = (low + high + 1) // 2
            tried = self._predicted(case, plan.ways, tuple(order[middle:]))
            if tried.prediction.memory.total <= self._limit:
                low, best = middle, tried
            else:
                high = middle - 1
        return best

    def _by_worth(self, case: _Case, plan: _Plan) -> list[str]:
        """Blocks by what recomputing them costs in seconds per byte that it saves."""
        worth: list[tuple[float, int, str]] = []
        chosen = case.priced.tables.places(plan.ways)
        again = case.objective - case.priced.seconds
        saved = case.priced.num_bytes - case.num_bytes
        for number, block in enumerate(self._pricer.blocks):
            places = [chosen[name] for name in block.nodes]
            worth.append((-float(again[places].sum()) / max(float(saved[places].sum()), 1.0), number, block.name))
        return [name for _, _, name in sorted(worth)]

    def _lightest(self, case: _Case) -> _Plan | None:
        found = case.problem.solve(case.num_bytes)
        return None if found is None else self._plan(case, found)

    def _plan(self, case: _Case, found: Assignment) -> _Plan:
        every = tuple(block.name for block in self._pricer.blocks) if case.again_seconds is not None else ()
        return self._predicted(case, case.priced.tables.chosen(found.options), every)

    def _predicted(self, case: _Case, ways: dict[str, Way], recompute: tuple[str, ...]) -> _Plan:
        order = {block.name: place for place, block in enumerate(self._pricer.blocks)}
        names = tuple(sorted(recompute, key=order.__getitem__))
        candidate = self._pricer.candidate(case.outline, ways, names)
        return _Plan(ways, predict(candidate, self._pricer.model))

    def _too_large(self, case: _Case, entry: Judged) -> Judged:
        plan = self._lightest(case)
        if plan is None:
            return entry
        needed = plan.prediction.memory.total
        reason = f"needs {format_bytes(needed)}, {format_bytes(needed - self._limit)} more than a rank may fill"
        return dataclasses.replace(entry, verdict="too large", reason=reason, prediction=plan.prediction)

    def _sorted(self) -> tuple[Judged, ...]:
        order = list(self._judged.values())
        fitting = [entry for entry in order if entry.fits]
        first = min(fitting, key=lambda entry: entry.seconds, default=None)
        told = [self._told(entry, first) for entry in order]
        rank = {"chosen": 0, "slower": 1, "not tried": 1, "too large": 2}
        return tuple(sorted(told, key=lambda entry: (rank[entry.verdict], entry.seconds)))

    def _told(self, entry: Judged, first: Judged | None) -> Judged:
        if first is None or entry.verdict == "too large" or entry.reason:
            return entry
        idle = self._num_ranks - entry.outline.mesh.num_ranks
        also = f"; {idle} ranks stay idle" if idle else ""
        if entry is first:
            return dataclasses.replace(entry, verdict="chosen", reason=f"the fastest that fits{also}")
        ratio = entry.seconds / first.seconds
        if entry.verdict == "slower":
            return dataclasses.replace(entry, reason=f"{ratio:.2f} times the chosen plan's time{also}")
        return dataclasses.replace(entry, reason=f"at least {ratio:.2f} times the chosen plan's time{also}")


def nearest_misses(found: Found, number: int = 3) -> Iterator[Judged]:
    """The candidates that come nearest to fitting, where nothing fits."""
    large = [entry for entry in found.candidates if entry.verdict == "too large" and entry.prediction is not None]
    yield from sorted(large, key=lambda entry: entry.prediction.memory.total if entry.prediction else 0)[:number]
