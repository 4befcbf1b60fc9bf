"""Planning a run: its network, its training, the devices, and what the search finds for them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from convmesh.config import RunConfig
from convmesh.config.rules import resolve_mesh
from convmesh.errors import ConfigError, ConvMeshError
from convmesh.graph import Graph
from convmesh.mesh import Mesh, parse_mesh
from convmesh.plan import Foretold, Plan, resolve
from convmesh.plan.load import dump_plan, load_plan
from convmesh.plan.network import network_facts
from convmesh.planner.candidates import Wishes
from convmesh.planner.cluster import Cluster
from convmesh.planner.cluster_file import load_cluster
from convmesh.planner.found import NUM_MISSES, Found, Judged, nearest_misses
from convmesh.planner.prediction import Prediction, Seconds, Training
from convmesh.planner.pricing import Pricer
from convmesh.planner.search import Refuses, search
from convmesh.planner.seconds import CostModel
from convmesh.training.ranks import find_rank
from convmesh.training.run_graph import ImageShape, cached_graph, refuses_of
from convmesh.units import format_bytes

_TRACED_SAMPLES = 2
"""Samples of the trace; batch norm needs more than one value per channel."""

_MOST_REASONS = 8

AUTO = "auto"
"""What stands for a plan that is to be made."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a plan is asked for.

    Args:
        run: The run.
        num_ranks: The ranks there are.
        memory_bytes: What each may fill; default what a device of the cluster has.
        cluster: A cluster file, or the name of a preset; default the preset for this machine.
        wishes: What is fixed beforehand.
        image_shape_HWC: Shape of the images; default the data's.
        num_classes: Number of classes; default the data's.
    """

    run: RunConfig
    num_ranks: int
    memory_bytes: int | None = None
    cluster: str | Path | None = None
    wishes: Wishes = dataclasses.field(default_factory=Wishes)
    image_shape_HWC: ImageShape | None = None
    num_classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the search has found for a run.

    Args:
        task: What was asked for.
        pricer: Network, training and devices.
        found: The candidates.
        cluster_reason: Which figures the devices have, in words.
        refuses: What the engine says to a plan; None if it can run all.
    """

    task: Task
    pricer: Pricer
    found: Found
    cluster_reason: str
    refuses: Refuses | None = None

    @property
    def graph(self) -> Graph:
        """The network."""
        return self.pricer.graph

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return self.pricer.model.cluster

    @cached_property
    def plan(self) -> Plan:
        """The chosen plan, with what was foretold of it, for this very network.

        Raises:
            ConfigError: If nothing fits, or the engine can't run what does; these plans and the nearest misses are
                told, and what would fit.
        """
        chosen = self.found.chosen
        if chosen is None or chosen.prediction is None:
            misses = [f"{describe(entry)} {entry.reason}" for entry in self._passed_over]
            raise ConfigError(
                f"no plan for {self.task.num_ranks} ranks fits into {format_bytes(self.found.memory_bytes)} of each",
                got="; ".join(misses) or "no mesh on which the samples can be dealt",
                fix=" ".join(self.ways_out()) or "Use more devices, or more memory of each",
            )
        plan = chosen.prediction.candidate.resolved.plan
        plan = dataclasses.replace(plan, network=network_facts(self.graph), foretold=self._foretold(chosen))
        resolve(self.graph, plan)  # What was planned must be what is run.
        return plan

    @property
    def _passed_over(self) -> list[Judged]:
        return [*self.found.refusals[:NUM_MISSES], *nearest_misses(self.found)]

    def ways_out(self) -> list[str]:
        """What would make it fit where nothing does: freedom, memory, devices, a smaller batch."""
        found = []
        if self.task.wishes != Wishes():
            limit = self.found.memory_bytes
            free = search(self.pricer, num_ranks=self.task.num_ranks, memory_bytes=limit, refuses=self.refuses)
            if free.chosen is not None:
                found.append(f"Without what was fixed beforehand {describe(free.chosen)} would fit.")
        for miss in nearest_misses(self.found, 1):
            if miss.prediction is not None:
                found.append(f"With {format_bytes(miss.prediction.memory.total)} of memory {describe(miss)} would fit.")
        for number in (2, 4, 8, 16):
            more = self._with(num_ranks=self.task.num_ranks * number)
            if more is not None:
                found.append(f"{self.task.num_ranks * number} such devices would do, as {describe(more)}.")
                break
        batch = self.pricer.training.global_batch
        for smaller in (batch // 2, batch // 4, batch // 8):
            less = self._with(global_batch=smaller) if smaller >= 1 else None
            if less is not None:
                found.append(f"A global batch of {smaller} would fit, as {describe(less)}.")
                break
        return found

    def _with(self, *, num_ranks: int | None = None, global_batch: int | None = None) -> Judged | None:
        pricer = self.pricer if global_batch is None else self.pricer.for_batch(global_batch)
        wishes, number = self.task.wishes, num_ranks or self.task.num_ranks
        if num_ranks is not None:
            wishes = dataclasses.replace(wishes, uses_all=True)  # That fewer of them would not do is known already.
        try:
            limit = self.found.memory_bytes
            return search(pricer, num_ranks=number, memory_bytes=limit, wishes=wishes, refuses=self.refuses).chosen
        except ConvMeshError:
            return None  # The cluster has no links for so many.

    def _foretold(self, chosen: Judged) -> Foretold:
        prediction = chosen.prediction
        assert prediction is not None
        return Foretold(
            cluster=self.cluster.name,
            global_batch=prediction.candidate.training.global_batch,
            seconds=round(prediction.seconds.total, 9),
            seconds_by_kind={kind: round(value, 9) for kind, value in seconds_by_kind(prediction.seconds).items()},
            memory_bytes=prediction.memory.total,
            memory_by_kind=prediction.memory.parts,
            memory_limit_bytes=self.found.memory_bytes,
            reasons=tuple(self._reasons()),
        )

    def _reasons(self) -> Iterator[str]:
        yield f"devices: {self.cluster_reason}"
        yield from (f"{describe(entry)}: {entry.reason}" for entry in notable(self.found)[:_MOST_REASONS])
        yield from (f"{mesh}: {reason}" for mesh, reason in self.found.refused[:_MOST_REASONS])


def make_plan(task: Task) -> Planned:
    """Plans a run; computes nothing of it.

    Args:
        task: What is asked for.

    Returns:
        What the search has found, which may be that nothing fits.

    Raises:
        ConvMeshError: If the network can't be read, or the cluster file is wrong or lacks links.
    """
    cluster, reason = _cluster_of(task)
    graph = cached_graph(
        task.run, batch=_TRACED_SAMPLES, image_shape_HWC=task.image_shape_HWC, num_classes=task.num_classes
    )
    pricer = Pricer(graph, Training.of(task.run), CostModel(cluster), bucket_bytes=task.run.strategy.bucket_bytes)
    refuses = refuses_of(task.run, image_shape_HWC=task.image_shape_HWC, num_classes=task.num_classes)
    found = search(
        pricer, num_ranks=task.num_ranks, memory_bytes=task.memory_bytes, wishes=task.wishes, refuses=refuses
    )
    return Planned(task=task, pricer=pricer, found=found, cluster_reason=reason, refuses=refuses)


@contextlib.contextmanager
def auto_plan(
    run: RunConfig,
    *,
    num_ranks: int | None = None,
    mesh: Mesh | None = None,
    cluster: str | Path | None = None,
    memory_bytes: int | None = None,
) -> Iterator[Path]:
    """Plans a run that is about to start, and keeps the plan in a file as long as it is looked at.

    Args:
        run: The run.
        num_ranks: The ranks there are; default as in the run file, else 1.
        mesh: The mesh, if it is fixed beforehand.
        cluster: A cluster file or preset; default the preset for this machine.
        memory_bytes: What each rank may fill; default what a device of the cluster has.

    Yields:
        The plan file.

    Raises:
        ConfigError: If nothing fits.
    """
    ranks = resolve_mesh(run, num_ranks=num_ranks, mesh=mesh).num_ranks
    # Ranks that others have started can't be left out.
    wishes = Wishes(mesh=mesh, uses_all=find_rank(os.environ) is not None)
    planned = make_plan(Task(run=run, num_ranks=ranks, memory_bytes=memory_bytes, cluster=cluster, wishes=wishes))
    with tempfile.TemporaryDirectory(prefix="convmesh-plan-") as root:
        path = Path(root) / "plan.yaml"
        path.write_text(dump_plan(planned.plan), encoding="utf-8")
        yield path


def is_for(path: Path, *, ranks: int | None, mesh: Mesh | str | None) -> bool:
    """Whether the plan of an earlier run is for the ranks that there are now, so that it can go on by it.

    Args:
        path: Where the plan would be.
        ranks: The ranks there are; None for as many as it says.
        mesh: The mesh, if it is fixed.

    Returns:
        False too if there is none.

    Raises:
        ConfigError: If the file is damaged.
    """
    if not path.exists():
        return False
    earlier = load_plan(path).mesh
    if mesh is None:
        return ranks in {None, earlier.num_ranks}
    wanted = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    return all(earlier.size(axis) == wanted.size(axis) for axis in {*earlier.sizes, *wanted.sizes})


def seconds_by_kind(seconds: Seconds) -> dict[str, float]:
    """The parts of an update that add up to its seconds, in order, without those that are nothing."""
    parts = {"forward": seconds.forward, "backward": seconds.backward, "recomputation": seconds.recomputation}
    parts |= {f"communication, {axis}": value for axis, value in seconds.exposed.items()}
    parts |= {"optimizer": seconds.optimizer, "overhead": seconds.overhead, "data": seconds.data}
    return {kind: value for kind, value in parts.items() if value > 0}


def describe(entry: Judged) -> str:
    """A candidate in a few words: ``data=2,channel=2, 4 micro-batches, 3 blocks recomputed``."""
    outline = entry.outline
    sizes = {axis: size for axis, size in outline.mesh.sizes.items() if size > 1}
    words = [",".join(f"{axis}={size}" for axis, size in sizes.items()) or "one rank"]
    if outline.accumulation > 1:
        words.append(f"{outline.accumulation} micro-batches")
    if outline.recompute != "none":
        words.append(f"{recomputed_blocks(entry.prediction)} blocks recomputed" if entry.prediction else "recomputed")
    if outline.optimizer_sharding:
        words.append("sharded optimizer")
    return ", ".join(words)


def recomputed_blocks(prediction: Prediction) -> int:
    """The number of blocks that a plan recomputes."""
    return len(prediction.candidate.recompute)


def notable(found: Found) -> list[Judged]:
    """The candidates worth a line: the chosen one, plain data parallelism, and the best of every mesh.

    What the engine can't run is told right after the chosen one.
    """
    shown: dict[tuple[object, ...], Judged] = {}
    for entry in (found.chosen, *found.refusals[:1], found.plain):
        if entry is not None:
            shown[entry.outline.key] = entry
    seen: set[str] = set()
    for entry in found.candidates:
        mesh = str(entry.outline.mesh)
        if mesh not in seen:
            seen.add(mesh)
            shown.setdefault(entry.outline.key, entry)
    return list(shown.values())


def _cluster_of(task: Task) -> tuple[Cluster, str]:
    if task.cluster is not None:
        cluster = load_cluster(task.cluster)
        foreign = cluster.engine is not None and cluster.engine != task.run.engine
        also = f", though measured with {cluster.engine}" if foreign else ""
        return cluster, f"{cluster.name}, from {task.cluster}{also}"
    name = machine_preset(task.run)
    cluster = load_cluster(name)
    return cluster, f"{cluster.name}, the preset {name} for machines of this kind; convmesh calibrate measures this one"


def machine_preset(run: RunConfig, *, root: Path = Path("/")) -> str:
    """The preset for the kind of devices that this machine has, found without any framework.

    Args:
        run: Says which device and engine it wants.
        root: Where the folders ``dev`` and ``proc`` are; for tests.

    Returns:
        The name of a preset.
    """
    device = run.train.device
    if device == "ascend" or (device == "auto" and any(root.glob("dev/davinci[0-9]*"))):
        return "ascend910b-8"
    if device == "cuda" or (device == "auto" and any(root.glob("dev/nvidia[0-9]*"))):
        models = [path.read_text(errors="replace") for path in root.glob("proc/driver/nvidia/gpus/*/information")]
        return "h200-8" if any("H200" in text for text in models) else "a100-8"
    return "cpu-mccl" if run.engine == "mindspore" else "cpu-gloo"
