"""The search: the optimum of the cost model within memory, never worse than plain data parallelism, monotone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import cluster_of, residual_network
from tests.graph_builder import GRAPHS, Builder, dense_net

from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import Plan, ResolvedPlan, resolve
from convmesh.planner.bisection import largest_that_fits
from convmesh.planner.candidates import Wishes, accumulations, factorisations, list_outlines
from convmesh.planner.found import Found, nearest_misses
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Candidate, Prediction, Training
from convmesh.planner.pricing import Pricer
from convmesh.planner.scaling import efficiency, scaling_points
from convmesh.planner.search import search
from convmesh.planner.seconds import CostModel
from convmesh.planner.ways import Way, entries_of, list_ways

MIB = 2**20
BATCH = 8


def tiny() -> Graph:
    build = Builder(channels=4, samples=BATCH, size=16)
    x = build.relu("relu1", build.convolution("conv1", "input", 16))
    return build.graph(build.dense_head(build.relu("relu2", build.convolution("conv2", x, 8)), classes=6))


def pricer_of(graph: Graph, *, global_batch: int = BATCH, engine: Any = "torch", **cluster: Any) -> Pricer:
    model = CostModel(cluster_of(**{"overlap": 0.0, **cluster}))
    return Pricer(graph, Training(engine=engine, global_batch=global_batch), model, bucket_bytes=25 * MIB)


def found_of(graph: Graph, num_ranks: int, *, memory_bytes: int | None = None, **rest: Any) -> Found:
    asked = {name: rest.pop(name, None) for name in ("wishes", "refuses")}
    return search(pricer_of(graph, **rest), num_ranks=num_ranks, memory_bytes=memory_bytes, **asked)


def seconds_of(found: Found) -> float:
    return math.inf if found.chosen is None else found.chosen.seconds


def link(rate: float) -> dict[str, Any]:
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
    links = [{"kind": kind, "num_ranks": 2, "alpha_seconds": 1e-5, "seconds_per_byte": 1 / rate} for kind in kinds]
    return {"inside": links, "between": links}


def combinations(ways: Mapping[str, tuple[Way, ...]]) -> Iterator[dict[str, Way]]:
    """All ways that fit together."""
    names = list(ways)

    def extended(place: int, values: dict[str, int], chosen: dict[str, Way]) -> Iterator[dict[str, Way]]:
        if place == len(names):
            yield dict(chosen)
            return
        for way in ways[names[place]]:
            if all(values.get(port, value) == value for port, value in way.ports.items()):
                yield from extended(place + 1, {**values, **way.ports}, {**chosen, names[place]: way})

    return extended(0, {}, {})


def every_prediction(graph: Graph, pricer: Pricer, num_ranks: int) -> Iterator[Prediction]:
    outlines = list_outlines(graph, global_batch=BATCH, num_ranks=num_ranks, has_blocks=False).found
    for outline in outlines:
        for chosen in combinations(list_ways(graph, outline.mesh.size("channel"))):
            entries = entries_of(chosen) if outline.mesh.size("channel") > 1 else ()
            candidate = Candidate(
                resolved=resolve(graph, Plan(mesh=outline.mesh, entries=entries)),
                training=pricer.training,
                accumulation=outline.accumulation,
                optimizer_sharding=outline.optimizer_sharding,
            )
            yield predict(candidate, pricer.model)


@pytest.mark.parametrize("overlap", [0.0, 0.7])
def test_it_finds_the_optimum_that_trying_everything_finds(overlap: float) -> None:
    graph = tiny()
    pricer = pricer_of(graph, overlap=overlap, links=link(1e11), device=device(0))
    everything = [(entry.memory.total, entry.seconds.total) for entry in every_prediction(graph, pricer, 2)]
    sizes = sorted({size for size, _ in everything})
    assert len(everything) > 500
    for limit in (sizes[0] - 1, sizes[0], sizes[len(sizes) // 5], sizes[-1]):
        expected = min((seconds for size, seconds in everything if size <= limit), default=math.inf)
        found = search(pricer, num_ranks=2, memory_bytes=limit)
        assert seconds_of(found) == pytest.approx(expected, rel=1e-9)
        if found.chosen is not None:
            assert found.chosen.is_proved


def device(fixed_bytes: int) -> dict[str, Any]:
    return {"name": "round", "memory_bytes": "16GiB", "fixed_bytes": fixed_bytes}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_plan_costs_what_was_promised_and_keeps_its_limit(name: str, num_ranks: int) -> None:
    graph = GRAPHS[name](samples=2)
    free = found_of(graph, num_ranks, global_batch=16, device=device(0))
    assert free.chosen is not None
    assert free.chosen.prediction is not None
    needed = free.chosen.prediction.memory.total
    for share in (1.0, 0.8, 0.6):
        found = found_of(graph, num_ranks, global_batch=16, device=device(0), memory_bytes=int(needed * share))
        if found.chosen is None:
            continue
        prediction = found.chosen.prediction
        assert prediction is not None
        assert prediction.memory.total <= needed * share
        plan = prediction.candidate.resolved.plan
        again = dataclasses.replace(prediction.candidate, resolved=resolve(graph, plan))
        model = pricer_of(graph, device=device(0)).model
        assert predict(again, model).seconds.total == pytest.approx(prediction.seconds.total, rel=1e-9)
        assert predict(again, model).memory == prediction.memory


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_it_is_never_slower_than_plain_data_parallelism(num_ranks: int) -> None:
    found = found_of(residual_network(), num_ranks, global_batch=64, overlap=0.5)
    assert found.plain is not None
    assert found.plain.fits
    assert seconds_of(found) <= found.plain.seconds


@given(rates=st.lists(st.floats(1e8, 1e13), min_size=2, max_size=2), overlap=st.sampled_from((0.0, 0.5)))
@settings(max_examples=6, deadline=None)
def test_more_bandwidth_is_never_slower(rates: list[float], overlap: float) -> None:
    slow, fast = sorted(rates)
    graph = tiny()
    assert seconds_of(found_of(graph, 4, links=link(fast), overlap=overlap)) <= seconds_of(
        found_of(graph, 4, links=link(slow), overlap=overlap)
    ) * (1 + 1e-9)


@given(limits=st.lists(st.integers(20_000, 400_000), min_size=2, max_size=2))
@settings(max_examples=4, deadline=None)
def test_more_memory_is_never_slower(limits: list[int]) -> None:
    less, more = sorted(limits)
    graph = tiny()
    tight, roomy = (found_of(graph, 2, memory_bytes=limit, device=device(0)) for limit in (less, more))
    assert seconds_of(roomy) <= seconds_of(tight) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["residual", "dense_net"])
def test_more_memory_is_never_slower_in_networks_that_are_too_large_for_a_proof(name: str) -> None:
    graph = GRAPHS[name](samples=2)
    wishes = Wishes(mesh=Mesh({"data": 2, "channel": 2}))
    devices = {**device(0), "kind": "cuda"}  # Without memory through which channels are exchanged.
    options: dict[str, Any] = {"global_batch": 16, "device": devices, "links": link(1e10), "wishes": wishes}
    free = found_of(graph, 4, **options).chosen
    assert free is not None
    assert free.prediction is not None
    assert not free.is_proved
    needed = free.prediction.memory.total
    times = [
        seconds_of(found_of(graph, 4, memory_bytes=int(needed * share), **options)) for share in (0.3, 0.5, 0.8, 1.0)
    ]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(times))
    assert times[-1] < times[1] < math.inf


def test_what_is_too_large_says_how_much_it_needs_at_least() -> None:
    graph = GRAPHS["residual"](samples=2)
    for limit in (100_000, 400_000):
        found = found_of(graph, 2, global_batch=16, device=device(0), memory_bytes=limit)
        large = [entry for entry in found.candidates if entry.verdict == "too large"]
        assert large
        for entry in large:
            assert entry.floor_bytes > limit or entry.prediction is not None
            if entry.prediction is not None:
                assert entry.prediction.memory.total > limit
                assert entry.floor_bytes <= entry.prediction.memory.total
            assert ("at least" in entry.reason) == (entry.prediction is None)
        if found.chosen is None:
            # The nearest misses are told exactly: no other candidate could be nearer.
            misses = list(nearest_misses(found))
            worst = max(entry.prediction.memory.total for entry in misses if entry.prediction is not None)
            assert len(misses) == 3
            assert all(entry.floor_bytes >= worst for entry in large if entry.prediction is None)


@pytest.mark.parametrize(("most", "largest", "guess"), [*itertools.product((1, 5, 40), (0, 1, 4, 33), (0, 3, 90))])
def test_the_largest_number_that_fits_is_found_from_any_guess(most: int, largest: int, guess: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        assert 0 < number <= most
        return number <= largest

    assert largest_that_fits(fits, most, guess) == min(largest, most)
    assert len(asked) == len(set(asked)) <= 13


@pytest.mark.parametrize("rate", [1e8, 1e11])
def test_more_devices_are_never_slower(rate: float) -> None:
    """Where links are slow, some of them stay idle, and the plan says so."""
    times = [seconds_of(found_of(tiny(), number, links=link(rate))) for number in (1, 2, 4, 8)]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in itertools.pairwise(times))
    if rate == 1e8:
        chosen = found_of(tiny(), 4, links=link(rate)).chosen
        assert chosen is not None
        assert chosen.outline.mesh.num_ranks < 4
        assert "idle" in chosen.reason


def test_it_is_deterministic() -> None:
    one, other = (found_of(residual_network(), 4, memory_bytes=108 * MIB) for _ in range(2))
    assert [(entry.outline.key, entry.seconds, entry.reason) for entry in one.candidates] == [
        (entry.outline.key, entry.seconds, entry.reason) for entry in other.candidates
    ]


def test_recomputation_is_used_for_as_few_blocks_as_will_do() -> None:
    graph = dense_net(8, samples=32, size=32)
    wishes = Wishes(mesh=Mesh({"data": 1}), accumulation=1)
    free = found_of(graph, 1, global_batch=32, wishes=wishes, device=device(0))
    assert free.chosen is not None
    assert free.chosen.prediction is not None
    needed = free.chosen.prediction.memory.total
    counts = []
    for share in (1.0, 0.9, 0.8):
        found = found_of(graph, 1, global_batch=32, wishes=wishes, device=device(0), memory_bytes=int(needed * share))
        assert found.chosen is not None
        assert found.chosen.prediction is not None
        counts.append(len(found.chosen.prediction.candidate.recompute))
    assert counts[0] == 0 < counts[1] < counts[2]


def test_recomputation_is_not_credited_where_the_engine_saves_nothing_by_it() -> None:
    graph = dense_net(8, samples=32, size=32)
    mesh, words = Mesh({"data": 1}), "recomputing saves no memory with MindSpore on the CPU"

    def found(memory_bytes: int | None, kind: str, **wishes: Any) -> Found:
        devices = {**device(0), "kind": kind}
        wished = Wishes(mesh=mesh, accumulation=1, **wishes)
        return found_of(
            graph, 1, engine="mindspore", global_batch=32, wishes=wished, device=devices, memory_bytes=memory_bytes
        )

    free = found(None, "cpu").chosen
    assert free is not None
    assert free.prediction is not None
    tight = int(0.9 * free.prediction.memory.total)
    assert found(tight, "ascend").chosen is not None
    on_cpu = found(tight, "cpu")
    assert on_cpu.chosen is None
    assert {entry.outline.recompute: entry.reason for entry in on_cpu.candidates}["blocks"] == words
    # Asked for, it is judged as it is.
    forced = found(tight, "cpu", recompute="blocks").candidates[0]
    assert forced.prediction is not None
    assert forced.prediction.memory.total > free.prediction.memory.total


def test_what_fits_nowhere_is_told_with_the_nearest_misses() -> None:
    found = found_of(tiny(), 2, memory_bytes=1000)
    assert found.chosen is None
    misses = list(nearest_misses(found))
    assert len(misses) == 3
    assert all("more than a rank may fill" in entry.reason for entry in misses)


def test_meshes_that_cannot_be_are_refused_with_their_reason() -> None:
    found = list_outlines(tiny(), global_batch=12, num_ranks=32)
    reasons = {str(mesh): reason for mesh, reason in found.refused}
    assert "a global batch of 12 samples" in reasons["data=32,channel=1"]
    assert "no layer has more than" in reasons["data=1,channel=32"]
    assert "evenly" in reasons["data=8,channel=4"]
    assert all(12 % outline.mesh.size("data") == 0 for outline in found.found)


def test_factors_and_micro_batches() -> None:
    assert list(factorisations(4, 3)) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    assert accumulations(12) == [1, 2, 4, 12]


def test_scaling_plans_for_every_number_of_devices() -> None:
    pricer = pricer_of(tiny(), links=link(1e11))
    points = list(scaling_points(pricer, samples_per_rank=4, num_ranks=(2, 4, 16)))
    assert [(point.kind, point.num_ranks, point.global_batch) for point in points] == [
        ("strong", 2, 8), ("weak", 2, 8), ("strong", 4, 8), ("weak", 4, 16), ("strong", 16, 8), ("weak", 16, 64)
    ]  # fmt: skip
    for point in points:
        assert point.outline is not None
        assert point.outline.mesh.num_ranks == point.num_ranks
    # Eight samples can't be dealt to sixteen ranks; channels can be split besides.
    assert points[4].plain_seconds is None
    assert efficiency(points[1], points[1]) == 1
    assert pricer.training.global_batch == 8


def refuses_channels(resolved: ResolvedPlan) -> str | None:
    return "it can't split channels" if resolved.num_ranks > 1 else None


def test_what_the_engine_refuses_is_passed_over_for_the_next_best() -> None:
    # Large weights on tiny images: channels are cheap to split, gradients dear to sum.
    asked: dict[str, Any] = {"links": link(1e8), "wishes": Wishes(uses_all=True)}
    graph = residual_network(width=128, size=2)
    free = found_of(graph, 4, **asked)
    assert free.chosen is not None
    assert free.chosen.outline.mesh.size("channel") > 1, "else nothing would be refused"
    found = found_of(graph, 4, refuses=refuses_channels, **asked)
    assert found.chosen is not None
    assert found.chosen.outline.mesh.size("channel") == 1
    assert found.chosen.reason.startswith("the fastest that fits and can be run")
    # Not any other, but the one that wins where there is no axis for channels.
    alone = found_of(graph, 4, **{**asked, "wishes": Wishes(mesh=found.chosen.outline.mesh)})
    assert found.chosen.seconds == seconds_of(alone)
    assert free.chosen.outline in [entry.outline for entry in found.refusals]
    assert all(entry.reason == "can't be run: it can't split channels" for entry in found.refusals)
    assert all(entry.seconds < found.plain.seconds for entry in found.refusals if found.plain is not None)


def test_where_all_is_refused_nothing_is_chosen() -> None:
    found = found_of(tiny(), 2, refuses=lambda _plan: "not today")
    assert found.chosen is None
    assert found.refusals
