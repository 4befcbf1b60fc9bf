"""Calibrating: ranks measure what plans are judged by, and a cluster file is made of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from convmesh.config import RunConfig, load_config, parse_config
from convmesh.config.schema import DataConfig, ModelConfig
from convmesh.data.open import open_data
from convmesh.engines import is_installed, load_engine, load_launcher
from convmesh.engines.calibrating import PROBES, Measurement, Probe
from convmesh.engines.tracing import trace
from convmesh.errors import EngineError, raise_all
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import Plan, resolve
from convmesh.planner.cluster import Cluster, Curve, Device, Direction, Link, Links, Measured, Point
from convmesh.planner.curves import Curves
from convmesh.planner.fitting import fit_alpha_beta, fit_spare, spread_of, typical
from convmesh.planner.measuring import chunks_of, curve_signatures, network_signatures, probe_graph, update_shapes
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Candidate, MemoryUse, Training
from convmesh.planner.signature import Signature
from convmesh.training.calibrate_worker import COLLECTIVE_BYTES, REDUCTION_BYTES, Task, load_measurement
from convmesh.training.launch import launch, plan_launch, threads_per_rank
from convmesh.training.run_folder import RunFolder

SECONDS = 85.0
"""Time for measuring, beside starting the ranks."""

_LEAST_SECONDS = 1e-9
_DEFAULT = RunConfig(model=ModelConfig(name="cnn-small"), data=DataConfig(source="digits"))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is calibrated.

    Args:
        run: The run whose engine, memory order, optimizer and data count.
        num_ranks: Ranks that compute at once.
        device: Resolved.
        graph: The network whose operators are measured at exactly their shapes, or None.
        seconds: Time for measuring, beside starting the ranks.
        num_rounds: How often an operator is run.
        reads_data: Whether the run's data is read.
        collective_bytes: Sizes at which collectives are measured.
        reduction_bytes: Sizes at which all-reduces are measured besides.
    """

    run: RunConfig
    num_ranks: int
    device: str
    graph: Graph | None = None
    seconds: float = SECONDS
    num_rounds: int = 5
    reads_data: bool = False
    collective_bytes: Sequence[int] = COLLECTIVE_BYTES
    reduction_bytes: Sequence[int] = REDUCTION_BYTES


def calibrate(subject: Subject, *, on_phases: Callable[[Mapping[str, float]], None] | None = None) -> Cluster:
    """Starts ranks that measure, and makes a cluster of what they found.

    Args:
        subject: What is calibrated.
        on_phases: Told how many seconds each part took.

    Returns:
        The cluster.

    Raises:
        LaunchError: If the ranks can't be started, or one of them died.
        ConvMeshError: What the first failing rank could not do.
    """
    found = signatures_of(subject)
    with tempfile.TemporaryDirectory(prefix="convmesh-calibrate-") as root:
        folder = RunFolder(Path(root) / "ranks")
        try:
            folder.prepare(subject.run, resume=False)
            task_of(subject, found).write(folder.root)
            plan = plan_launch(
                subject.run,
                folder=folder,
                mesh=Mesh({"data": subject.num_ranks}),
                device=subject.device,
                worker="convmesh.training.calibrate_worker",
            )
            launch(plan, folder=folder, lasts=False)
        finally:
            folder.release()
        measured = [load_measurement(folder.root, rank=rank) for rank in range(subject.num_ranks)]
    if on_phases is not None:
        on_phases(measured[0].phases)
    return cluster_of(subject, found, measured)


def signatures_of(subject: Subject) -> list[Signature]:
    """The operators that are measured: for the curves, then those of the network, the most wanted first."""
    if subject.graph is None:
        return curve_signatures()
    run = subject.run
    wanted = tuple(dict.fromkeys((run.strategy.accumulation, 1, 2, 4)))
    own = network_signatures(
        subject.graph, num_ranks=subject.num_ranks, global_batch=run.train.global_batch, accumulations=wanted
    )
    return list({entry.text: entry for entry in (*curve_signatures(), *own)}.values())


def task_of(subject: Subject, found: Sequence[Signature]) -> Task:
    """What the ranks are told to measure."""
    return Task(
        graphs=[signature.graph().to_json() for signature in found],
        chunks=chunks_of(found),
        updates=update_shapes(subject.graph),
        seconds=subject.seconds,
        num_rounds=subject.num_rounds,
        reads_data=subject.reads_data,
        collective_bytes=tuple(subject.collective_bytes),
        reduction_bytes=tuple(subject.reduction_bytes),
    )


def cluster_of(subject: Subject, found: Sequence[Signature], measured: Sequence[Measurement]) -> Cluster:
    """Makes a cluster of what ranks measured.

    Args:
        subject: What was calibrated.
        found: The operators of the task.
        measured: What each rank measured.

    Returns:
        The cluster.
    """
    compute = _Compute(subject, found, measured)
    links = Links(inside=tuple(_links(measured)))
    cluster = Cluster(
        name=f"{subject.num_ranks} ranks of {subject.run.engine} on {_machine(subject)}",
        sources={"measured": _source(subject, compute.num_rounds)},
        engine=subject.run.engine,
        device=_device(subject, measured),
        devices_per_node=subject.num_ranks,
        num_ranks_measured=subject.num_ranks,
        compute=tuple(compute.curves()),
        measured=tuple(compute.exact()),
        links=links,
        overlap=min((entry.overlap for entry in measured if entry.overlap is not None), default=0.0),
        update_seconds=max(entry.overhead.update_seconds for entry in measured),
        micro_batch_seconds=max(entry.overhead.micro_batch_seconds for entry in measured),
        data_seconds_per_sample=max((s for s in (m.data_seconds for m in measured) if s is not None), default=None),
    )
    cluster = dataclasses.replace(cluster, compute=(*cluster.compute, *_updates(subject, cluster, measured)))
    return dataclasses.replace(cluster, device=_with_spare(subject, cluster, measured))


class _Compute:
    """Seconds of operators, from all ranks and rounds."""

    def __init__(self, subject: Subject, found: Sequence[Signature], measured: Sequence[Measurement]) -> None:
        self._shares = shares_cores(subject)
        self._is_curve = {signature.text for signature in curve_signatures()}
        self._samples: list[tuple[Signature, list[float], list[float]]] = []
        for place, signature in enumerate(found):
            ranks = [times for entry in measured if (times := entry.operators.get(place)) is not None]
            forward = [second for times in ranks for second in times.forward]
            if forward:
                self._samples.append((signature, forward, [second for times in ranks for second in times.backward]))
        self.num_rounds = subject.num_rounds

    def exact(self) -> Iterator[Measured]:
        """Every operator at its shapes."""
        for signature, forward, backward in self._samples:
            yield Measured(
                signature=signature.text,
                forward_seconds=typical(forward, shares_cores=self._shares),
                backward_seconds=typical(backward, shares_cores=self._shares),
            )

    def curves(self) -> Iterator[Curve]:
        """One curve per class and direction."""
        directions: tuple[Direction, ...] = ("forward", "backward")
        points: dict[tuple[str, Direction], list[Point]] = {}
        for signature, *samples in self._samples:
            if signature.text not in self._is_curve:
                continue
            cost = signature.cost
            for direction, seconds in zip(directions, samples, strict=True):
                taken = typical(seconds, shares_cores=self._shares)
                if taken > 0:
                    flops = cost.flops_forward if direction == "forward" else cost.flops_backward
                    point = Point(flops=flops, num_bytes=signature.num_bytes(direction), seconds=taken)
                    points.setdefault((signature.operator_class, direction), []).append(point)
        for (name, direction), entries in points.items():
            yield Curve(operator=name, direction=direction, points=tuple(entries))  # type: ignore[arg-type]


def shares_cores(subject: Subject) -> bool:
    """Whether more threads compute than there are cores."""
    num_cores = len(os.sched_getaffinity(0))
    return subject.device == "cpu" and subject.num_ranks * threads_per_rank(subject.num_ranks) > num_cores


def _links(measured: Sequence[Measurement]) -> Iterator[Link]:
    """Alpha and beta of each kind; of each repetition the rank that took longest counts."""
    for index, (kind, way, ranks, sizes) in enumerate(measured[0].collectives):
        of_ranks = [entry.collectives[index][3] for entry in measured]
        num_bytes, seconds, spreads = [], [], []
        for place, size in enumerate(sizes):
            slowest = [max(again) for again in zip(*(times[place].seconds for times in of_ranks), strict=True)]
            num_bytes.append(size.num_bytes)
            seconds.append(max(typical(slowest, shares_cores=False), _LEAST_SECONDS))
            spreads.append(spread_of(slowest))
        line = fit_alpha_beta(num_bytes, seconds)
        yield Link(
            kind=kind,  # type: ignore[arg-type]
            way=way,  # type: ignore[arg-type]
            num_ranks=ranks.size,
            num_groups=ranks.mesh.num_ranks // ranks.size,
            alpha_seconds=line.alpha_seconds,
            seconds_per_byte=line.seconds_per_byte,
            spread=typical(spreads, shares_cores=False),
        )


def _updates(subject: Subject, cluster: Cluster, measured: Sequence[Measurement]) -> Iterator[Curve]:
    """The optimizer's curve, without the pass over gradients that the planner counts apart."""
    curves, points = Curves(cluster), []
    for size in measured[0].updates:
        seconds = typical([s for entry in measured for s in entry.updates[size]], shares_cores=shares_cores(subject))
        norm = curves.seconds("elementwise", "float32", "forward", flops=0, num_bytes=size)
        points.append(Point(num_bytes=size, seconds=max(seconds - norm, _LEAST_SECONDS)))
    if points:
        yield Curve(operator=subject.run.optimizer.name, points=tuple(points))


def _device(subject: Subject, measured: Sequence[Measurement]) -> Device:
    fixed = max(entry.memory.fixed_bytes for entry in measured)
    return Device(
        name=f"one rank of {subject.num_ranks} on {_machine(subject)}",
        kind=subject.device,  # type: ignore[arg-type]
        memory_bytes=psutil.virtual_memory().total // subject.num_ranks,
        fixed_bytes=fixed,
        bytes_per_operator=max(entry.memory.bytes_per_operator for entry in measured),
        num_threads=threads_per_rank(subject.num_ranks) if subject.device == "cpu" else 1,
    )


def _machine(subject: Subject) -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}" if subject.device == "cpu" else subject.device


def _with_spare(subject: Subject, cluster: Cluster, measured: Sequence[Measurement]) -> Device:
    """The device with what training the probes took beyond their tensors."""
    ranks = [entry.memory.probe_bytes for entry in measured]
    held = [max(of_ranks) for of_ranks in zip(*ranks, strict=True)]
    uses = [_tensors(subject, cluster, probe) for probe in PROBES[: len(held)]]
    spare = fit_spare(
        held,
        [use.activations + use.passing + use.workspace for use in uses],
        [use.parameters + use.gradients + use.optimizer for use in uses],
    )
    return dataclasses.replace(
        cluster.device,
        fixed_bytes=cluster.device.fixed_bytes + spare.fixed_bytes,
        spare_share=spare.activation_share,
        spare_parameter_share=spare.parameter_share,
    )


def _tensors(subject: Subject, cluster: Cluster, probe: Probe) -> MemoryUse:
    """What the planner says that a probe holds."""
    graph = probe_graph(**dataclasses.asdict(probe))
    training = dataclasses.replace(Training.of(subject.run), global_batch=probe.num_samples)
    return predict(Candidate(resolved=resolve(graph, Plan(mesh=Mesh({"data": 1}))), training=training), cluster).memory


def _source(subject: Subject, num_rounds: int) -> str:
    engine = subject.run.engine
    threads = threads_per_rank(subject.num_ranks)
    return (
        f"convmesh calibrate --ranks {subject.num_ranks} on {time.strftime('%Y-%m-%d')}: {subject.device}, "
        f"{os.cpu_count()} cores, {threads} thread(s) per rank, {engine} {importlib.metadata.version(engine)}; "
        f"operators: {'mean' if shares_cores(subject) else 'median'} of {num_rounds} rounds of all ranks at once"
    )


def subject_of(
    config: str | Path | None,
    *,
    num_ranks: int,
    engine: str | None = None,
    overrides: Sequence[str] = (),
    seconds: float = SECONDS,
) -> Subject:
    """What a user asks to calibrate, checked.

    Args:
        config: A run file; without one, curves alone are measured.
        num_ranks: Ranks that compute at once.
        engine: ``"mindspore"`` or ``"torch"``; default as in the run file.
        overrides: Settings of the run file as ``a.b=value``.
        seconds: Time for measuring.

    Returns:
        The subject, its network read.

    Raises:
        EngineError: If the engine is not installed.
        ConvMeshError: If the run file is wrong, its data is missing, or its network can't be read.
    """
    run = _DEFAULT if config is None else load_config(config, overrides=tuple(overrides))
    if engine is not None:
        run = parse_config({**dataclasses.asdict(run), "engine": engine})
    if not is_installed(run.engine):
        raise EngineError(
            f"the engine '{run.engine}' is not installed", fix=f"Install it with: pip install 'convmesh[{run.engine}]'"
        )
    # What is measured are single ranks; how they are laid out is what plans are for.
    alone = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, mesh={}, plan=None))
    launcher = load_launcher(run.engine)
    device = launcher.resolve_device(run.train.device)
    raise_all(launcher.check(alone, device=device, num_ranks=num_ranks))
    graph = None if config is None else _graph(run)
    return Subject(
        run=alone, num_ranks=num_ranks, device=device, graph=graph, seconds=seconds, reads_data=config is not None
    )


def _graph(run: RunConfig) -> Graph:
    datasets = open_data(run.data)
    network = load_engine(run.engine).build_network(
        run.model, num_classes=len(datasets.class_names), num_channels=datasets.num_channels, seed=run.train.seed
    )
    height, width, num_channels = datasets.image_shape_HWC
    return trace(network, (run.train.global_batch, num_channels, height, width))
