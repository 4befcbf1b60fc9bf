"""Foresight: how long a step of a profiled run would take with other settings.

The planner's cost model, with the constants that the profile measured, says by how much the step changes; what it does
not know of (data, unequal ranks, whatever nobody noted) is taken from the profile as it was measured:

    step = communication + the largest of the ranks' (other work + reading) + what the model says that changes

With loader workers a rank no longer reads itself: it takes over what they have read, micro-batch by micro-batch, and
waits for what they have not read yet, which is simulated step by step. And a step takes no less than what all ranks and
workers of a node compute, spread over its cores.

Legend: R ranks, S steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from convmesh.config import RunConfig
from convmesh.config.execution import execution_of
from convmesh.data.open import DataSets
from convmesh.data.reader import sampler_of
from convmesh.engines.reading_ahead import UPDATES_AHEAD, readers_of
from convmesh.graph import Graph
from convmesh.mesh import Mesh
from convmesh.plan import Plan, resolve
from convmesh.planner.cluster import Cluster
from convmesh.planner.links import GroupShape
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Candidate, Prediction, Seconds, Training
from convmesh.planner.refit import refit
from convmesh.planner.seconds import CostModel
from convmesh.profiling.events import Floats
from convmesh.profiling.observed import Observed


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to run.

    Args:
        run: The run.
        plan: Its mesh, and how its operators are split.
    """

    run: RunConfig
    plan: Plan

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        return self.plan.mesh

    @property
    def settled(self) -> Plan:
        """Its plan, with what the run file says about running an update."""
        return dataclasses.replace(self.plan, execution=execution_of(self.run))

    def candidate(self, graph: Graph) -> Candidate:
        """What the planner judges; what the run file says about running an update counts.

        Raises:
            ConvMeshError: If the plan does not fit the network.
        """
        return Candidate.of(resolve(graph, self.settled), self.run)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Of one node, as the profile found it.

    Args:
        cores: Its cores; 0 if not known.
        num_ranks: Ranks on it.
        cpu_seconds: What a rank's process computed on them in a step, reading included.
        reading_cpu_seconds: The part of it that was reading.
        hand_over_seconds: In which a rank takes a micro-batch that a worker has read; 0 if not known.
    """

    cores: float = 0.0
    num_ranks: float = 1.0
    cpu_seconds: float = 0.0
    reading_cpu_seconds: float = 0.0
    hand_over_seconds: float = 0.0


class Foresight:
    """Predicts the step of a run with other settings.

    Args:
        setting: How the run was run.
        observed: What its profile measured.
        graph: Its network, at any number of samples.
        cluster: The devices, as known beforehand.
        datasets: Its data; None if it can't be opened.
        machine: Of a node.
        is_preset: Whether the cluster is a preset that nobody has named: then links that the run has not used are
            hardly known.

    Attributes:
        setting: How the run was run.
        observed: What its profile measured.
        graph: Its network.
        cluster: The devices with the constants that the profile measured.
        model: What they cost.
        datasets: Its data.
        machine: Of a node.
        is_preset: Whether nobody has named the cluster.

    Raises:
        ConvMeshError: If the plan does not fit the network, or the cluster lacks links.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        observed: Observed,
        graph: Graph,
        cluster: Cluster,
        datasets: DataSets | None = None,
        machine: Machine | None = None,
        is_preset: bool = False,
    ) -> None:
        self.setting, self.observed, self.graph, self.datasets = setting, observed, graph, datasets
        self.machine, self.is_preset = machine or Machine(), is_preset
        candidate, before = setting.candidate(graph), CostModel(cluster)
        groups: dict[str, GroupShape] = {axis: before.group(candidate.resolved, axis) for axis in setting.mesh.sizes}
        self.cluster = refit(cluster, observed, predict(candidate, before), groups)
        self.model = CostModel(self.cluster)
        self._known: list[tuple[Plan, Training, Prediction]] = []
        self._now = self.predict(setting)

    def seconds(self, setting: Setting) -> float:
        """Of a step.

        Args:
            setting: Other settings of the same run.

        Returns:
            The prediction; for the settings of the run itself, what was measured.

        Raises:
            ConvMeshError: If the settings don't fit the network.
        """
        computing, communicating = self._changed(self.predict(setting).seconds)
        observed, workers = self.observed, readers_of(setting.run)
        rest = observed.communication_seconds + computing + communicating
        if workers == self._num_readers:
            reading_RS = observed.reading_RS if workers else self.reading_as(setting)
            return rest + observed.own_seconds(reading_RS)
        rest += observed.own_seconds(np.zeros_like(observed.reading_RS))
        if workers == 0:
            return rest + self._reading_alone
        rest += setting.run.strategy.accumulation * self._hand_over_seconds
        return max(self._read_ahead(setting, rest, workers), self._computing(computing))

    def _changed(self, then: Seconds) -> tuple[float, float]:
        """Seconds of a step by which computing and communication change.

        Collectives that run while a late rank still works cost nothing, which the model does not know: no more is taken
        away than was seen.
        """
        now, seen = self._now.seconds, self.observed.communication_seconds
        communicating = then.communication - now.communication
        share = min(1.0, seen / now.communication) if now.communication else 1.0
        return then.total - now.total - communicating, share * communicating

    def memory_bytes(self, setting: Setting) -> int:
        """Of the rank that needs most: what was measured, and by how much the prediction changes."""
        now = self._now.memory.total
        return (self.observed.peak_memory_bytes or now) + self.predict(setting).memory.total - now

    def fits(self, setting: Setting) -> bool:
        """Whether a rank of these devices can hold it; what the run itself held fits in any case."""
        limit = max(self.cluster.device.memory_bytes, self.observed.peak_memory_bytes)
        return self.memory_bytes(setting) <= limit

    def predict(self, setting: Setting) -> Prediction:
        """What the cost model says of settings, without their data; kept, since most of them are asked for again."""
        plan, training = setting.settled, Training.of(setting.run)
        for of_plan, of_training, known in self._known:
            if (of_plan, of_training) == (plan, training):
                return known
        found = predict(setting.candidate(self.graph), self.model)
        self._known.append((plan, training, found))
        return found

    def reading_as(self, setting: Setting) -> Floats:
        """Seconds that each rank would read in each step with another sampler, shape (R, S)."""
        reading_RS = self.observed.reading_RS
        if setting.run.data.sampler == self.setting.run.data.sampler or self.costs_RS is None:
            return reading_RS
        moved_RS = self.seconds_per_cost * (self.costs_of(setting.run) - self.costs_RS)
        dealt: Floats = np.maximum(reading_RS + moved_RS, 0.0)
        return dealt

    @cached_property
    def costs_RS(self) -> Floats | None:  # noqa: N802 - carries its shape
        """Cost of the samples of each rank and step, as the source knows it; None where all cost the same."""
        if self.datasets is None or self.datasets.train.cost_unit == "samples":
            return None
        return self.costs_of(self.setting.run)

    @cached_property
    def seconds_per_cost(self) -> float:
        """Seconds of reading per unit of cost, where a sample has seconds of its own besides."""
        if self.costs_RS is None:
            return 0.0
        from scipy.optimize import nnls

        unit = float(self.costs_RS.max()) or 1.0
        number = self.observed.num_samples_RS.ravel().astype(float)
        columns = np.column_stack([number, self.costs_RS.ravel() / unit])
        return float(nnls(columns, self.observed.reading_RS.ravel())[0][1]) / unit

    def costs_of(self, run: RunConfig) -> Floats:
        """Cost of the samples of each rank and profiled step, shape (R, S)."""
        assert self.datasets is not None
        source, mesh = self.datasets.train, self.setting.mesh
        sampler = sampler_of(run, source, num_shards=mesh.size("data"))
        costs_N = source.costs(np.arange(source.num_samples))
        found = np.zeros((mesh.num_ranks, len(self.observed.step_S)))
        for place, step in enumerate(self.observed.step_S.tolist()):
            epoch, update = divmod(step, sampler.num_updates)
            for rank in range(mesh.num_ranks):
                parts = sampler.micro_batches(epoch, update, mesh.coordinate(rank).get("data", 0))
                found[rank, place] = sum(float(costs_N[part].sum()) for part in parts)
        return found

    @cached_property
    def _reading_alone(self) -> float:
        """Seconds in which one process reads the samples of a rank and step."""
        if not self._num_readers:
            return self.observed.reading_seconds
        # Only what workers could not hide is seen: if anything, they are busy all the time.
        return self._num_readers * self.observed.step_seconds

    @property
    def _hand_over_seconds(self) -> float:
        """Of a micro-batch; where workers read in the profile, it is in what ranks waited for."""
        return 0.0 if self._num_readers else self.machine.hand_over_seconds

    @property
    def _num_readers(self) -> int:
        return readers_of(self.setting.run)

    def _read_ahead(self, setting: Setting, rest: float, workers: int) -> float:
        """Seconds of a step, if workers of each rank read what it read itself, as far ahead as the loaders allow.

        The profiled steps are gone through twice, and the second time counts: by then workers are as far ahead as they
        get. All ranks end a step together.
        """
        reading_RS = self.reading_as(setting)
        if self._num_readers:
            reading_RS = np.full_like(reading_RS, self._reading_alone)
        read_R, end, ends = np.zeros(len(reading_RS)), 0.0, [0.0]
        taken = [read_R] * UPDATES_AHEAD
        for reading_R in np.concatenate([reading_RS, reading_RS], axis=1).T:
            read_R = np.maximum(read_R, taken[-UPDATES_AHEAD]) + reading_R / workers
            taken.append(np.maximum(end, read_R))
            end = float(taken[-1].max()) + rest
            ends.append(end)
        num_steps = reading_RS.shape[1]
        return (end - ends[num_steps]) / num_steps

    def _computing(self, changed: float) -> float:
        """Seconds that the cores of a node take for all that ranks and workers compute in a step."""
        machine = self.machine
        if not machine.cores:
            return 0.0
        reading = machine.reading_cpu_seconds
        if self._num_readers:
            reading = self._reading_alone  # Of workers, nobody knows how much of it was waiting.
        own = machine.cpu_seconds - machine.reading_cpu_seconds
        if self.cluster.device.kind == "cpu":
            own = max(own + changed, 0.0)
        return machine.num_ranks * (own + reading) / machine.cores
