"""The search for the plan that takes least time within the memory of each rank.

1. All outlines (`convmesh.planner.candidates`) are priced, and each one's best splits without a limit of memory found:
   a floor of its seconds.
2. From the lowest floor on, outlines are judged: the best splits that fit, by `convmesh.planner.predict`. Where they
   don't fit as they are, splits that take less memory and recomputation are tried, the latter for as few blocks as
   will do. What is kept beyond the floor of the bytes is carried over as a margin until the prediction fits.
3. It ends when no floor is below the best plan found. Plain data parallelism is judged first, so the plan is never
   slower than it. Meshes that leave ranks idle are tried last, and only if they could be faster.
4. A plan that would be the best so far is shown to the engine; one that it can't run is passed over.

Networks with few ways (``EXACT_WAYS``) are searched until the optimum of the cost model is proved, way by way in the
order of their floors. Nothing depends on chance or on time.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from convmesh.plan import ResolvedPlan
from convmesh.planner.assignment import Assignment, Problem
from convmesh.planner.bisection import largest_that_fits
from convmesh.planner.candidates import Outline, Wishes, list_outlines
from convmesh.planner.curves import Floats
from convmesh.planner.found import NUM_MISSES, REFUSED, Found, Judged
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Prediction
from convmesh.planner.pricing import Priced, Pricer
from convmesh.planner.ways import Way
from convmesh.units import format_bytes

EXACT_WAYS = 80
"""Ways of all operators together up to which the optimum is proved."""

_MOST_PROOFS = 500
_MOST_STEPS = 50_000
_MOST_MARGINS = 5
_CARE = 0.02
"""Floors are trusted to this share: where a curve bends, the straight line of `pricing` may lie above it."""


Refuses = Callable[[ResolvedPlan], str | None]
"""Why the engine can't run a plan; None if it can."""


def search(
    pricer: Pricer,
    *,
    num_ranks: int,
    memory_bytes: int | None = None,
    wishes: Wishes | None = None,
    refuses: Refuses | None = None,
) -> Found:
    """Finds the best plan.

    Args:
        pricer: Network, training and devices.
        num_ranks: The ranks there are.
        memory_bytes: What each may fill; what a device of the cluster has, if left out.
        wishes: What is fixed beforehand.
        refuses: What the engine says to a plan; it can run all, if left out.

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
    judged = _Search(pricer, num_ranks, limit, refuses or (lambda _plan: None)).run(outlines.found)
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


@dataclass(frozen=True)
class _Best:
    """What is known of the best plan of a case within the limit.

    Args:
        plan: The plan; None if there is none.
        is_proved: Whether it is the optimum of the cost model.
        floor_bytes: What any plan of the case needs at least.
        lightest: The plan that needs least, where it was looked at.
    """

    plan: _Plan | None
    is_proved: bool = False
    floor_bytes: int = 0
    lightest: _Plan | None = None


class _Search:
    """The best plan so far and the candidates that were looked at."""

    def __init__(self, pricer: Pricer, num_ranks: int, limit: int, refuses: Refuses) -> None:
        self._pricer = pricer
        self._refuses = refuses
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
        if not any(entry.fits for entry in self._judged.values()):
            self._predict_misses()
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
                    self._judged[outline.key] = self._seen(dataclasses.replace(entry, prediction=prediction))

    def _note_work(self, outline: Outline, priced: Priced) -> None:
        if outline.mesh.size("data") == outline.mesh.num_ranks:
            seconds = priced.operator_seconds * outline.mesh.num_ranks / self._pricer.training.global_batch
            self._seconds_per_sample = min(self._seconds_per_sample, seconds)

    def _judge(self, outline: Outline, priced: Priced) -> Judged:
        entry = Judged(outline=outline, floor_seconds=priced.floor_seconds)
        if priced.floor_seconds * (1 - _CARE) >= self._best and not outline.is_plain:
            return entry
        reason = self._needless(entry)
        if reason is not None:
            return dataclasses.replace(entry, reason=reason)
        case = self._case(outline, priced)
        best = self._best_plan(case)
        if best.plan is None:
            return self._too_large(case, entry, best)
        prediction = best.plan.prediction
        return self._seen(dataclasses.replace(entry, prediction=prediction, is_proved=best.is_proved))

    def _seen(self, entry: Judged) -> Judged:
        """A candidate whose plan fits, as the engine sees it, which is asked only where the plan would be chosen."""
        assert entry.prediction is not None
        if entry.seconds < self._best:
            reason = self._refuses(entry.prediction.candidate.resolved)
            if reason is not None:
                return dataclasses.replace(entry, verdict="refused", reason=f"{REFUSED}: {reason}")
            self._best = entry.seconds
        return dataclasses.replace(entry, verdict="slower")

    def _needless(self, entry: Judged) -> str | None:
        """Why nothing is won by recomputing blocks, if that is so: the same without it was judged before."""
        without = self._judged.get(dataclasses.replace(entry.outline, recompute="none").key)
        if entry.outline.recompute == "none" or without is None:
            return None
        if without.verdict == "slower" and without.seconds <= entry.seconds * (1 + _CARE):
            return "nothing needs to be recomputed: it fits without"
        return self._pricer.recomputing_saves_nothing

    def _case(self, outline: Outline, priced: Priced) -> _Case:
        if outline.recompute == "none":
            return _Case(outline, priced, None, priced.num_bytes)
        return _Case(outline, priced, *self._pricer.recomputing(outline))

    def _best_plan(self, case: _Case) -> _Best:
        """The fastest plan within the limit, as far as is known."""
        lightest = case.problem.solve(case.num_bytes)
        floor = math.inf if lightest is None else lightest.cost + case.priced.fixed_bytes
        if lightest is None or floor > self._limit:
            return _Best(None, floor_bytes=math.ceil(floor) if lightest is not None else 0)
        if case.again_seconds is None and case.priced.free is not None and not case.is_small:
            plan = self._plan(case, case.priced.free)
            if plan.prediction.memory.total <= self._limit:
                return _Best(plan)
        best = dataclasses.replace(self._within(case, lightest), floor_bytes=math.ceil(floor))
        if case.again_seconds is not None:
            return best if best.plan is None else _Best(self._fewer_blocks(case, best.plan))
        return self._proved(case, best) if case.is_small else best

    def _proved(self, case: _Case, known: _Best) -> _Best:
        """Goes through all splits whose floor is below the best plan found."""
        best = known.plan

        def bound() -> float:
            if best is None:
                return math.inf
            return best.prediction.seconds.total * (1 - 1e-9) - case.priced.fixed_seconds

        limit = self._limit - case.priced.fixed_bytes
        for number, found in enumerate(
            case.problem.below(case.objective, loads=case.num_bytes, limit=limit, bound=bound, most_steps=_MOST_STEPS)
        ):
            if found is None or number == _MOST_PROOFS:
                return dataclasses.replace(known, plan=best)
            plan = self._plan(case, found)
            fits = plan.prediction.memory.total <= self._limit
            if fits and (best is None or plan.prediction.seconds.total < best.prediction.seconds.total):
                best = plan
        return dataclasses.replace(known, plan=best, is_proved=True)

    def _within(self, case: _Case, lightest: Assignment) -> _Best:
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
                return _Best(plan)
            margin += excess
        least = self._plan(case, lightest)
        return _Best(least if least.prediction.memory.total <= self._limit else None, lightest=least)

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
        worth = self._by_worth(case, plan)
        order = [name for _, _, name in worth]
        tried: dict[int, _Plan] = {0: plan}

        def fits(number: int) -> bool:
            tried[number] = self._predicted(case, plan.ways, tuple(order[number:]))
            return tried[number].prediction.memory.total <= self._limit

        # If the peak grew by all that spared blocks keep, so many could be spared.
        kept = np.cumsum([saved for _, saved, _ in worth])
        guess = int(np.searchsorted(kept, self._limit - plan.prediction.memory.total, side="right"))
        return tried[largest_that_fits(fits, len(order), guess)]

    def _by_worth(self, case: _Case, plan: _Plan) -> list[tuple[float, float, str]]:
        """Blocks by what recomputing them costs per byte that it saves: minus that, the bytes, and the name."""
        worth: list[tuple[float, int, float, str]] = []
        chosen = case.priced.tables.places(plan.ways)
        again = case.objective - case.priced.seconds
        saved = case.priced.num_bytes - case.num_bytes
        for number, block in enumerate(self._pricer.blocks):
            places = [chosen[name] for name in block.nodes]
            num_bytes = max(float(saved[places].sum()), 0.0)
            worth.append((-float(again[places].sum()) / max(num_bytes, 1.0), number, num_bytes, block.name))
        return [(price, num_bytes, name) for price, _, num_bytes, name in sorted(worth)]

    def _plan(self, case: _Case, found: Assignment) -> _Plan:
        every = tuple(block.name for block in self._pricer.blocks) if case.again_seconds is not None else ()
        return self._predicted(case, case.priced.tables.chosen(found.options), every)

    def _predicted(self, case: _Case, ways: dict[str, Way], recompute: tuple[str, ...]) -> _Plan:
        order = {block.name: place for place, block in enumerate(self._pricer.blocks)}
        names = tuple(sorted(recompute, key=order.__getitem__))
        candidate = self._pricer.candidate(case.outline, ways, names)
        costs = self._pricer.operator_costs(case.outline, ways)
        return _Plan(ways, predict(candidate, self._pricer.model, operators=costs))

    def _too_large(self, case: _Case, entry: Judged, best: _Best) -> Judged:
        """A candidate of which no plan fits: what it needs, or the floor of that if that tells enough."""
        if not best.floor_bytes:
            return entry  # No splits fit together.
        plan = best.lightest
        if plan is None and entry.outline.is_plain:
            plan = self._lightest(case)
        needed, words = (best.floor_bytes, "at least ") if plan is None else (plan.prediction.memory.total, "")
        over = format_bytes(needed - self._limit)
        return dataclasses.replace(
            entry,
            verdict="too large",
            floor_bytes=best.floor_bytes,
            reason=f"needs {words}{format_bytes(needed)}, {over} more than a rank may fill",
            prediction=None if plan is None else plan.prediction,
        )

    def _lightest(self, case: _Case) -> _Plan | None:
        found = case.problem.solve(case.num_bytes)
        return None if found is None else self._plan(case, found)

    def _predict_misses(self) -> None:
        """Where nothing fits, predicts what the nearest misses really need."""
        large = [entry for entry in self._judged.values() if entry.verdict == "too large"]
        known = sorted(entry.prediction.memory.total for entry in large if entry.prediction is not None)
        for entry in sorted(large, key=lambda entry: entry.floor_bytes):
            if len(known) >= NUM_MISSES and entry.floor_bytes >= known[NUM_MISSES - 1]:
                break
            if entry.prediction is None:
                case = self._case(entry.outline, self._pricer.price(entry.outline))
                told = self._too_large(case, entry, _Best(None, False, entry.floor_bytes, self._lightest(case)))
                self._judged[entry.outline.key] = told
                assert told.prediction is not None
                bisect.insort(known, told.prediction.memory.total)

    def _sorted(self) -> tuple[Judged, ...]:
        order = list(self._judged.values())
        fitting = [entry for entry in order if entry.fits]
        first = min(fitting, key=lambda entry: entry.seconds, default=None)
        told = [self._told(entry, first) for entry in order]
        rank = {"chosen": 0, "slower": 1, "not tried": 1, "refused": 1, "too large": 2}
        return tuple(sorted(told, key=lambda entry: (rank[entry.verdict], entry.seconds)))

    def _told(self, entry: Judged, first: Judged | None) -> Judged:
        if first is None or entry.verdict == "too large" or entry.reason:
            return entry
        idle = self._num_ranks - entry.outline.mesh.num_ranks
        also = f"; {idle} ranks stay idle" if idle else ""
        if entry is first:
            able = " and can be run" if any(other.verdict == "refused" for other in self._judged.values()) else ""
            return dataclasses.replace(entry, verdict="chosen", reason=f"the fastest that fits{able}{also}")
        ratio = entry.seconds / first.seconds
        if entry.verdict == "slower":
            return dataclasses.replace(entry, reason=f"{ratio:.2f} times the chosen plan's time{also}")
        return dataclasses.replace(entry, reason=f"at least {ratio:.2f} times the chosen plan's time{also}")
