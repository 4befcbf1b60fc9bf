"""Advice on profiles with known answers: each rule speaks where it should, and with the right figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.planning import cluster_of, plain_network, residual_network

from convmesh.config import load_config, parse_config
from convmesh.data.batching import Batching
from convmesh.data.reader import sampler_of
from convmesh.errors import ConfigError
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import Plan
from convmesh.plan.by_rule import plan_by_rule
from convmesh.planner.links import GroupShape
from convmesh.planner.predict import predict
from convmesh.planner.prediction import MIB
from convmesh.planner.refit import refit
from convmesh.profiling.advice import Advice
from convmesh.profiling.analysis import analyse
from convmesh.profiling.events import EventBuilder, Trace
from convmesh.profiling.observed import Observed, Transfers, observe
from convmesh.report.advice_view import view_of
from convmesh.training.advice import Advising, advise, advise_on
from convmesh.training.foresight import Foresight, Machine, Setting

STEPS = np.arange(6)


def _run(**settings: Any) -> Any:
    content: dict[str, Any] = {
        "engine": "torch",
        "model": {"name": "cnn-small"},
        "data": {"source": "digits", "sampler": "random"},
        "train": {"global_batch": 32},
    }
    for path, value in settings.items():
        section, _, name = path.partition("__")
        content.setdefault(section, {})[name] = value
    return parse_config(content)


class _Source:
    cost_unit = "bytes"
    num_samples = 192
    labels_N = np.zeros(192, np.int32)

    def costs(self, ids: Any) -> Any:
        return np.random.default_rng(0).lognormal(sigma=1.2, size=self.num_samples)[ids]


class Case:
    """A run whose profile says what the cost model says, but for what a test changes."""

    def __init__(self, graph: Graph | None = None, *, mesh: dict[str, int] | None = None, **settings: Any) -> None:
        self.graph = graph or plain_network()
        self.mesh = Mesh(mesh or {"data": 2})
        self.cluster = cluster_of(overlap=0.0)
        plan = plan_by_rule(self.graph, self.mesh) if self.mesh.size("channel") > 1 else Plan(mesh=self.mesh)
        self.setting = Setting(run=_run(**settings), plan=plan)
        self.prediction = predict(self.setting.candidate(self.graph), self.cluster)
        self.datasets: Any = None

    def observed(self, *, reading: Any = 0.0, transfers: tuple[Transfers, ...] = (), peak: int = 0) -> Observed:
        seconds = self.prediction.seconds
        shape = (self.mesh.num_ranks, len(STEPS))
        own = seconds.total - seconds.communication
        reading_RS = np.zeros(shape) + reading
        step = seconds.communication + float((own + reading_RS).max(axis=0).mean())
        samples = self.setting.run.train.global_batch // self.mesh.size("data")
        return Observed(
            step_seconds=step,
            other_RS=np.full(shape, own),
            reading_RS=reading_RS,
            optimizer_seconds=seconds.optimizer,
            step_S=STEPS,
            num_samples_RS=np.full(shape, samples),
            transfers=transfers,
            peak_memory_bytes=peak,
        )

    def foresight(self, *, machine: Machine | None = None, is_preset: bool = False, **seen: Any) -> Foresight:
        return Foresight(
            self.setting,
            observed=self.observed(**seen),
            graph=self.graph,
            cluster=self.cluster,
            datasets=self.datasets,
            machine=machine,
            is_preset=is_preset,
        )

    def advise(self, **seen: Any) -> Advising:
        return advise_on(self.foresight(**seen))

    def costs_by_file(self) -> _Source:
        """Samples whose cost is known, as that of files is."""
        source = _Source()
        self.datasets = type("Data", (), {"train": source})
        return source

    def gradients(self) -> Transfers:
        """The buckets, as the cost model says that they travel."""
        from convmesh.planner.messages import local_parameters, update_messages
        from convmesh.planner.seconds import CostModel

        candidate, model = self.prediction.candidate, CostModel(self.cluster)
        messages = [
            message
            for message in update_messages(candidate, self.cluster, local_parameters(candidate))
            if message.carries
        ]
        return Transfers(
            axis="data",
            kind="all-reduce",
            purpose="gradients",
            num_ranks=2,
            num_per_step=len(messages),
            bytes_C=np.array([message.num_bytes for message in messages]),
            seconds_C=np.array([model.message_seconds(candidate.resolved, message) for message in messages]),
        )


def _kinds(advising: Advising) -> set[str]:
    return {piece.kind for piece in advising.advised.pieces}


def _piece(advising: Advising, kind: str) -> Advice:
    return next(piece for piece in advising.advised.pieces if piece.kind == kind)


def test_a_run_that_is_set_up_well_gets_no_advice() -> None:
    case = Case(plain_network(width=64))

    advising = case.advise(transfers=(case.gradients(),))

    assert _kinds(advising) == set()
    assert advising.setting is None
    with pytest.raises(ConfigError, match="no advice to apply"):
        advising.write(Path("never.yaml"))


def test_tiny_buckets_are_told_with_the_seconds_that_the_links_say() -> None:
    case, usual = Case(strategy__bucket_bytes=1), Case()
    gradients = case.gradients()

    advising = case.advise(transfers=(gradients,))

    piece = _piece(advising, "buckets")
    assert piece.changes == {"strategy.bucket_bytes": "25MiB"}
    assert piece.seen["number"] == len(gradients.bytes_C)
    saved = case.prediction.seconds.total - usual.prediction.seconds.total
    assert piece.seconds - piece.predicted_seconds == pytest.approx(saved, rel=0.02)
    assert advising.setting is not None
    assert advising.setting.run.strategy.bucket_bytes == 25 * MIB


def test_small_micro_batches_are_told_only_where_larger_ones_fit() -> None:
    case = Case(mesh={"data": 1}, strategy__accumulation=8)
    case.cluster = dataclasses.replace(case.cluster, micro_batch_seconds=1e-3)
    case.prediction = predict(case.setting.candidate(case.graph), case.cluster)

    piece = _piece(case.advise(), "accumulation")

    assert piece.changes == {"strategy.accumulation": 1}
    assert piece.seconds - piece.predicted_seconds == pytest.approx(7e-3, rel=0.1)
    assert piece.notes == ("batch_norm",)
    # A rank already holds as much as a device has.
    device = dataclasses.replace(case.cluster.device, memory_bytes=case.prediction.memory.total)
    case.cluster = dataclasses.replace(case.cluster, device=device)
    assert "accumulation" not in _kinds(case.advise(peak=case.prediction.memory.total))


def test_recomputation_is_dropped_where_memory_allows() -> None:
    graph = residual_network(width=64)
    kept, again = Case(graph, mesh={"data": 1}), Case(graph, mesh={"data": 1}, strategy__recompute="blocks")

    piece = _piece(again.advise(), "recomputation")

    assert piece.changes == {"strategy.recompute": "none"}
    saved = again.prediction.seconds.total - kept.prediction.seconds.total
    assert piece.seconds - piece.predicted_seconds == pytest.approx(saved, rel=0.05)
    assert "recomputation" not in _kinds(kept.advise())


def test_a_costly_optimizer_is_sharded_and_a_useless_sharding_undone() -> None:
    graph = plain_network(width=256, size=4)
    slow = {"operator": "sgd", "points": [{"num_bytes": 1e6, "seconds": 2e-2}]}
    compute = [
        {"operator": "convolution", "points": [{"flops": 1e9, "seconds": 1e-3}]},
        {"operator": "copy", "points": [{"num_bytes": 1e8, "seconds": 1e-3}]},
    ]
    case = Case(graph)
    case.cluster = cluster_of(overlap=0.0, compute=[*compute, slow])
    case.prediction = predict(case.setting.candidate(graph), case.cluster)

    piece = _piece(case.advise(), "optimizer_sharding")

    assert piece.changes == {"strategy.optimizer_sharding": True}
    assert piece.gain > 0.2
    undone = Case(graph, strategy__optimizer_sharding=True)
    assert _piece(undone.advise(), "optimizer_sharding").changes == {"strategy.optimizer_sharding": False}


def test_half_precision_is_told_but_not_among_what_is_applied() -> None:
    case = Case(plain_network(width=512, size=2, depth=3))

    advising = case.advise(transfers=(case.gradients(),))

    piece = _piece(advising, "half_gradients")
    assert piece.changes == {"precision.gradient_reduction": "bfloat16"}
    assert not piece.is_exact
    assert "half_gradients" not in advising.advised.together


def test_workers_hide_a_slow_disk_and_not_more_than_free_cores_can_compute() -> None:
    case = Case()
    rest = case.prediction.seconds.total
    reading = 0.5 * rest
    free = Machine(cores=8, num_ranks=2, cpu_seconds=rest, reading_cpu_seconds=0.0)

    piece = _piece(case.advise(reading=reading, machine=free), "workers")

    assert piece.changes == {"data.num_workers": 1}
    assert piece.predicted_seconds == pytest.approx(rest)
    # On two cores that two ranks keep busy, decoding elsewhere is no quicker.
    busy = Machine(cores=2, num_ranks=2, cpu_seconds=rest + reading, reading_cpu_seconds=reading)
    assert "workers" not in _kinds(case.advise(reading=reading, machine=busy))
    # Files that take long now and then still keep a rank waiting, and all ranks wait for it.
    uneven = np.array([[0.0, 0.0, 6.0, 0.0, 0.0, 0.0], [0.0] * 6]) * rest
    one = dataclasses.replace(case.setting, run=_run(data__num_workers=1))
    assert case.foresight(reading=uneven, machine=free).seconds(one) > 1.3 * rest
    # What takes three steps to read needs three workers, of those numbers that are tried four.
    slow = _piece(case.advise(reading=3 * rest, machine=free), "workers")
    assert slow.changes == {"data.num_workers": 4}
    assert slow.predicted_seconds == pytest.approx(rest)


@pytest.mark.parametrize("sampler", ["random", "stratified"])
def test_balanced_sampling_gives_what_the_costs_of_files_say(sampler: str) -> None:
    case = Case(data__sampler=sampler)
    source = case.costs_by_file()
    per_cost = 0.05 * case.prediction.seconds.total

    def reading(name: str) -> Any:
        run = _run(data__sampler=name)
        dealt = sampler_of(run, source, num_shards=2)  # type: ignore[arg-type]
        costs = source.costs(np.arange(source.num_samples))
        return per_cost * np.array(
            [[costs[np.concatenate(dealt.micro_batches(0, step, rank))].sum() for step in STEPS] for rank in range(2)]
        )

    busy = Machine(cores=1, num_ranks=2, cpu_seconds=1.0, reading_cpu_seconds=0.5)
    advising = case.advise(reading=reading(sampler), machine=busy)

    piece = _piece(advising, "sampling")
    saved = reading(sampler).max(axis=0).mean() - reading("balanced").max(axis=0).mean()
    assert piece.changes == {"data.sampler": "balanced"}
    assert piece.seconds - piece.predicted_seconds == pytest.approx(saved, rel=0.02)
    assert ("sampling" in advising.advised.together) == (sampler == "random")
    even = case.advise(reading=np.full((2, len(STEPS)), float(reading(sampler).mean())))
    assert "sampling" not in _kinds(even)


def test_another_mesh_is_told_with_its_plan_and_applied_only_if_its_links_are_known(tmp_path: Path) -> None:
    # Many weights and few pixels: sending gradients costs far more than sending activations.
    case = Case(plain_network(width=512, size=2, depth=6), train__global_batch=2)

    known, unknown = case.advise(), case.advise(is_preset=True)

    piece = _piece(known, "mesh")
    assert piece.changes["strategy.mesh"] == {"channel": 2}
    assert "mesh" in known.advised.together
    written = known.write(tmp_path / "better.yaml")
    better = load_config(written[0])
    assert dict(better.strategy.mesh) == {"channel": 2}
    assert better.strategy.plan == str(written[1])
    assert "mesh" not in unknown.advised.together
    assert "unmeasured" in _piece(unknown, "mesh").notes


def test_together_is_predicted_as_one_and_written_as_one(tmp_path: Path) -> None:
    case = Case(strategy__bucket_bytes=1, strategy__accumulation=4)
    case.cluster = dataclasses.replace(case.cluster, micro_batch_seconds=5e-5)
    case.prediction = predict(case.setting.candidate(case.graph), case.cluster)

    advising = case.advise(transfers=(case.gradients(),), reading=2e-4)

    advised = advising.advised
    assert set(advised.together) == {"accumulation", "buckets", "workers"}
    single = [piece.predicted_seconds for piece in advised.pieces if piece.kind in advised.together]
    assert advised.predicted_seconds < min(single)
    (path,) = advising.write(tmp_path / "better.yaml")
    assert load_config(path) == advising.setting.run  # type: ignore[union-attr]


def test_the_cluster_of_a_run_predicts_the_run_and_has_its_links() -> None:
    case = Case(plain_network(width=64), strategy__bucket_bytes=1)
    gradients = case.gradients()
    slower = dataclasses.replace(gradients, seconds_C=5e-4 + gradients.bytes_C / 1e9)
    observed = case.observed(transfers=(slower,))
    observed = dataclasses.replace(observed, other_RS=3 * observed.other_RS)

    fitted = refit(case.cluster, observed, case.prediction, {"data": GroupShape(num_ranks=2)})

    link = next(link for link in fitted.links.inside if link.kind == "all-reduce" and link.num_ranks == 2)
    assert link.alpha_seconds == pytest.approx(5e-4, rel=1e-6)
    assert 1 / link.seconds_per_byte == pytest.approx(1e9, rel=1e-6)
    predicted = predict(case.setting.candidate(case.graph), fitted)
    assert predicted.origins["data axis"] == "this run's profile"
    again = predicted.seconds
    assert again.forward == pytest.approx(case.prediction.seconds.forward * 3, rel=0.2)


def test_collectives_of_other_names_change_nothing() -> None:
    case = Case()
    foreign = dataclasses.replace(case.gradients(), kind="ncclDevKernel_AllReduce", purpose="")

    fitted = refit(
        case.cluster, case.observed(transfers=(foreign,)), case.prediction, {"data": GroupShape(num_ranks=2)}
    )

    assert fitted.links == case.cluster.links


def test_a_collective_that_waits_for_the_one_before_counts_only_its_own_time() -> None:
    builders = []
    for rank in range(2):
        builder = EventBuilder(rank)
        for step in range(5):
            builder.add("compute", "backward", start=step, end=step + 0.5)
            # All three are sent off at once and run one after the other.
            for number in range(3):
                builder.add(
                    "communication", "all-reduce gradients", start=step + 0.5, end=step + 0.6 + 0.1 * number,
                    axis="data", num_bytes=100, lane="buckets",
                )  # fmt: skip
            builder.add_step(step, start=step, end=step + 0.8 + 0.01, num_samples=4)
        builders.append(builder)
    trace = Trace(ranks=tuple(builder.build() for builder in builders), source="made up", mesh={"data": 2})

    observed = observe(analyse(trace, one_clock=True))

    (transfers,) = observed.transfers
    assert (transfers.kind, transfers.purpose, transfers.num_per_step) == ("all-reduce", "gradients", 3)
    assert transfers.seconds_C == pytest.approx(np.full(15, 0.1))
    assert observed.communication_seconds == pytest.approx(0.3)


def test_where_nothing_can_be_predicted_the_reason_is_told(tmp_path: Path) -> None:
    builder = EventBuilder(0)
    for step in range(6):
        builder.add("compute", "x", start=step, end=step + 0.5)
        builder.add_step(step, start=step, end=step + 1)
    analysis = analyse(Trace(ranks=(builder.build(),), source="elsewhere"))

    advised = advise(analysis, tmp_path).advised

    assert "no run file" in advised.silent
    assert not advised.pieces
    assert "no run file" in view_of(advised, language="en").sentence


def test_batching_is_checked_before_a_change_is_told() -> None:
    # 6 samples a rank can't be dealt to 4 micro-batches; nothing breaks, and nothing impossible is told.
    case = Case(train__global_batch=12, strategy__accumulation=2)

    changes = [piece.changes for piece in case.advise().advised.pieces]

    for change in changes:
        Batching(12, 2, int(change.get("strategy.accumulation", 2)))
