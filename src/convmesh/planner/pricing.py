"""What an outline costs as sums over the ways of its operators: the objective and the limit of the search.

Seconds of an update are those of its micro-batches, plus what follows from the bytes of parameters that a rank holds:
gradients and buffers on the data axis, passes over gradients, the optimizer. The latter is a straight line through the
cost model's answers for all parameters whole and for half of them; what the backward hides of the reduction is taken at
its best. Bytes are a floor (`convmesh.planner.tables`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from convmesh.graph import Graph, blocks
from convmesh.graph.resize import with_samples
from convmesh.mesh import Mesh
from convmesh.plan import CHANNEL, Entry, Execution, Plan, ResolvedPlan
from convmesh.planner.assignment import Assignment
from convmesh.planner.bills import WayCosts
from convmesh.planner.candidates import Outline
from convmesh.planner.curves import Floats
from convmesh.planner.links import GroupShape, group_shape
from convmesh.planner.memory import lasting_bytes
from convmesh.planner.messages import LocalParameters, local_parameters, update_messages, updated_bytes
from convmesh.planner.precision import with_precision
from convmesh.planner.predict import OperatorCosts
from convmesh.planner.prediction import Candidate, OperatorCost, Training
from convmesh.planner.recomputing import saves_nothing
from convmesh.planner.seconds import CostModel, gradient_passes
from convmesh.planner.tables import Tables
from convmesh.planner.ways import Way, entries_of


@dataclass(frozen=True)
class Priced:
    """An outline as sums over ways, nothing being recomputed.

    Args:
        tables: The ways on its channel axis.
        seconds: Seconds of an update per way.
        fixed_seconds: Seconds of an update whatever the ways.
        num_bytes: Floor of the bytes per way.
        fixed_bytes: Bytes whatever the ways.
        free: The cheapest ways, were there no limit of memory; None if no ways fit together.
        operator_seconds: Of an update, the operators of these ways alone.
    """

    tables: Tables
    seconds: Floats
    fixed_seconds: float
    num_bytes: Floats
    fixed_bytes: float
    free: Assignment | None
    operator_seconds: float

    @property
    def floor_seconds(self) -> float:
        """What an update takes at least."""
        return math.inf if self.free is None else self.free.cost + self.fixed_seconds


class Pricer:
    """Prices outlines of one network on one cluster, and remembers what outlines share.

    Args:
        graph: The network, at any number of samples.
        training: What it trains.
        model: The devices.
        bucket_bytes: Gradients are reduced in buckets of about this size.
    """

    def __init__(self, graph: Graph, training: Training, model: CostModel, *, bucket_bytes: int) -> None:
        self.training = training
        self.model = model
        self.bucket_bytes = bucket_bytes
        self.graph = graph
        self.blocks = blocks(graph)
        self._tables: dict[int, Tables] = {}
        self._graphs: dict[int, Graph] = {}
        self._costs: dict[tuple[int, int, GroupShape, bool], WayCosts] = {}
        self._priced: dict[tuple[object, ...], Priced] = {}
        self._known_costs: dict[tuple[int, int, GroupShape], dict[tuple[int, int, bool], OperatorCost]] = {}

    def for_batch(self, global_batch: int) -> Pricer:
        """The same for another global batch, sharing all that was found."""
        other = Pricer.__new__(Pricer)
        other.__dict__.update(self.__dict__)
        other.training = dataclasses.replace(self.training, global_batch=global_batch)
        return other

    def price(self, outline: Outline) -> Priced:
        """Prices an outline as if nothing were recomputed; what outlines share is found once.

        Raises:
            ConfigError: If the cluster says nothing of links that the outline needs.
        """
        key = (*dataclasses.replace(outline, recompute="none").key, self.training.global_batch)
        if key not in self._priced:
            self._priced[key] = self._price(outline)
        return self._priced[key]

    @property
    def recomputing_saves_nothing(self) -> str | None:
        """Why recomputation saves no memory with this engine and these devices; None where it does."""
        return saves_nothing(self.training.engine, self.model.cluster.device.kind)

    def recomputing(self, outline: Outline) -> tuple[Floats, Floats]:
        """Seconds of an update that recomputing all blocks costs besides, and the floor of the bytes then, per way."""
        priced, more = self.price(outline), self._costs_of(outline, recomputing=True)
        less = self._spare * (self._costs_of(outline).kept_bytes - more.kept_bytes)
        if self.recomputing_saves_nothing is not None:
            less = np.zeros_like(less)
        return outline.accumulation * more.seconds, priced.num_bytes - less

    def _price(self, outline: Outline) -> Priced:
        tables, costs = self.tables(outline.mesh), self._costs_of(outline)
        lines = _Lines(self._whole(outline, tables), self.model)
        seconds, num_bytes = outline.accumulation * costs.seconds, costs.kept_bytes
        for kind, own in tables.parameter_bytes.items():
            seconds = seconds + lines.slopes(kind)[0] * own
            num_bytes = num_bytes + lines.slopes(kind)[1] * own
        free = tables.problem.solve(seconds)
        working = 0.0 if free is None else outline.accumulation * tables.total(costs.seconds, free.options)
        return Priced(
            tables=tables,
            seconds=seconds,
            fixed_seconds=lines.fixed[0],
            num_bytes=self._spare * num_bytes,
            fixed_bytes=self._spare * lines.fixed[1] + self._engine_bytes(),
            free=free,
            operator_seconds=working,
        )

    @property
    def _spare(self) -> float:
        device = self.model.cluster.device
        return 1 + min(device.spare_share, device.parameter_share)  # A floor, whatever the bytes are of.

    def _engine_bytes(self) -> int:
        device = self.model.cluster.device
        return device.fixed_bytes + device.bytes_per_operator * len(self.graph)

    def tables(self, mesh: Mesh) -> Tables:
        """The ways on the channel axis of a mesh."""
        size = mesh.size(CHANNEL)
        if size not in self._tables:
            self._tables[size] = Tables(self.graph, size, self.blocks, graph_of=self._graph_at)
        return self._tables[size]

    def candidate(self, outline: Outline, ways: dict[str, Way], recompute: tuple[str, ...]) -> Candidate:
        """The plan that runs every operator in a given way.

        Args:
            outline: All else.
            ways: Operator to way.
            recompute: Names of the blocks that are recomputed.

        Returns:
            The candidate, its graph that of one micro-batch.
        """
        chosen = frozenset(recompute)
        every = len(chosen) == len(self.blocks) > 0
        execution = Execution(
            accumulation=outline.accumulation,
            optimizer_sharding=outline.optimizer_sharding,
            bucket_bytes=self.bucket_bytes,
            recompute=("*",) if every else recompute,
        )
        resolved = ResolvedPlan(
            graph=self._graph_at(self.samples(outline)),
            plan=Plan(mesh=outline.mesh, entries=self._entries(outline, ways), execution=execution),
            operators={name: way.resolved for name, way in ways.items()},
            recomputed=tuple(block for block in self.blocks if block.name in chosen),
        )
        return Candidate(
            resolved=resolved,
            training=self.training,
            accumulation=outline.accumulation,
            optimizer_sharding=outline.optimizer_sharding,
            bucket_bytes=self.bucket_bytes,
        )

    def operator_costs(self, outline: Outline, ways: Mapping[str, Way]) -> OperatorCosts:
        """What operators that run in given ways cost a rank per micro-batch, each found once.

        Args:
            outline: All else.
            ways: Operator to way, each one of ``tables``.

        Returns:
            What `convmesh.planner.predict.predict` asks for the candidate of the same outline and ways.
        """
        known = self._known_costs.setdefault(self._shapes_key(outline), {})

        def costs(resolved: ResolvedPlan, position: int) -> tuple[OperatorCost, ...]:
            inside = {name for block in resolved.recomputed for name in block.nodes}
            keys = {name: (position, id(way), name in inside) for name, way in ways.items()}
            missing = [resolved.graph.node(name) for name, key in keys.items() if key not in known]
            for cost in self.model.operators(resolved, missing, position=position):
                known[keys[cost.node]] = cost
            return tuple(known[key] for key in keys.values())

        return costs

    @staticmethod
    def _entries(outline: Outline, ways: dict[str, Way]) -> tuple[Entry, ...]:
        return entries_of(ways) if outline.mesh.size(CHANNEL) > 1 else ()

    def _whole(self, outline: Outline, tables: Tables) -> Candidate:
        return self.candidate(outline, {name: own[0] for name, own in tables.ways.items()}, ())

    def _graph_at(self, num_samples: int) -> Graph:
        if num_samples not in self._graphs:
            resized = with_samples(self.graph, num_samples)
            kind = self.model.cluster.device.kind
            self._graphs[num_samples] = with_precision(resized, self.training, device_kind=kind)
        return self._graphs[num_samples]

    def samples(self, outline: Outline) -> int:
        """Samples of one micro-batch."""
        return math.ceil(self.training.global_batch / (outline.mesh.size("data") * outline.accumulation))

    def _shapes_key(self, outline: Outline) -> tuple[int, int, GroupShape]:
        """What the costs of ways depend on."""
        devices = self.model.cluster.devices_per_node
        group = group_shape(outline.mesh, CHANNEL, devices_per_node=devices)
        return outline.mesh.size(CHANNEL), self.samples(outline), group

    def _costs_of(self, outline: Outline, *, recomputing: bool = False) -> WayCosts:
        key = *self._shapes_key(outline), recomputing
        if key not in self._costs:
            tables, num_samples = self.tables(outline.mesh), self.samples(outline)
            self._costs[key] = tables.costs(self.model, outline.mesh, num_samples, recomputing=recomputing)
        return self._costs[key]


class _Lines:
    """Seconds and bytes of an update over the parameters that a rank holds, as straight lines."""

    def __init__(self, candidate: Candidate, model: CostModel) -> None:
        self._candidate = candidate
        self._model = model
        self._whole = local_parameters(candidate)

    @functools.cached_property
    def _at_whole(self) -> tuple[float, float]:
        return self._of(self._whole)

    @property
    def fixed(self) -> tuple[float, float]:
        """Seconds and bytes where a rank holds no parameters."""
        seconds, num_bytes = self._at_whole
        for kind in ("trained", "frozen", "buffers"):
            slope, own = self.slopes(kind), self._size(kind)
            seconds, num_bytes = seconds - slope[0] * own, num_bytes - slope[1] * own
        return seconds, num_bytes

    @functools.cache  # noqa: B019 - lives no longer than the object
    def slopes(self, kind: str) -> tuple[float, float]:
        """Seconds and bytes per byte of parameters of one kind."""
        own = self._size(kind)
        if not own:
            return 0.0, 0.0
        if kind == "whole":
            return self._broadcast_seconds(), 0.0
        half = self._of(self._halved(kind))
        removed = own - self._size(kind, self._halved(kind))
        return tuple((whole - part) / removed for whole, part in zip(self._at_whole, half, strict=True))  # type: ignore[return-value]

    def _broadcast_seconds(self) -> float:
        """Per byte of a parameter that every rank of the channel axis holds, where equal work gives unequal bits."""
        group = self._model.group(self._candidate.resolved, CHANNEL)
        if group.num_ranks == 1 or self._model.cluster.device.kind == "cpu":
            return 0.0
        one, two = (self._model.collectives.seconds("broadcast", size, group) for size in (2.0**20, 2.0**21))
        return (two - one) / 2**20

    def _size(self, kind: str, own: LocalParameters | None = None) -> int:
        own = own or self._whole
        return {
            "trained": own.trainable_bytes,
            "whole": own.trainable_bytes,
            "frozen": own.frozen_bytes,
            "buffers": own.buffer_bytes,
        }[kind]

    def _halved(self, kind: str) -> LocalParameters:
        own = self._whole
        if kind == "trained":
            return dataclasses.replace(own, trainable=tuple((name, size // 2) for name, size in own.trainable))
        if kind == "frozen":
            return dataclasses.replace(own, frozen_bytes=own.frozen_bytes // 2)
        return dataclasses.replace(own, buffer_bytes=own.buffer_bytes // 2)

    def _of(self, own: LocalParameters) -> tuple[float, float]:
        candidate, model = self._candidate, self._model
        return self._seconds(own), float(lasting_bytes(candidate, model.cluster, own))

    def _seconds(self, own: LocalParameters) -> float:
        candidate, model, cluster = self._candidate, self._model, self._model.cluster
        hidden = cluster.overlap if candidate.training.engine == "torch" else 0.0
        seconds = 0.0
        for message in update_messages(candidate, cluster, own):
            if message.axis == CHANNEL and message.purpose == "gradients":
                continue  # Told by what is whole, not by what a rank holds.
            share = 1 - hidden if message.axis == "data" and message.carries else 1.0
            seconds += share * model.message_seconds(candidate.resolved, message)
        shards = candidate.num_shards if candidate.optimizer_sharding else 1
        seconds += model.moving(gradient_passes(candidate, own))
        seconds += model.optimizer_seconds(
            candidate.training, updated_bytes=updated_bytes(own, shards), gradient_bytes=own.trainable_bytes
        )
        return seconds + cluster.update_seconds + candidate.accumulation * cluster.micro_batch_seconds
