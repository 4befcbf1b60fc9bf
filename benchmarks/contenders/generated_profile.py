"""Profiles made from known numbers, as a run with a barrier at the end of each step would give them.

In each step a rank waits for data, computes its layers, sums their gradients over its axes and updates. A collective
begins when its rank arrives and ends on all ranks of the group together, a transfer after the last one has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from convmesh.mesh import Mesh
from convmesh.profiling.events import KINDS, NONE, RankEvents, Trace


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a generated run does in each step; times in seconds.

    Args:
        mesh: Axis name to size; each axis communicates once per layer.
        num_steps: Steps.
        num_layers: Layers, each computing equally long.
        compute: Of all layers together.
        data: Waiting for data.
        transfer: Of each collective.
        update: Of the optimizer.
        extra_compute: Rank to seconds more per step.
        extra_data: Rank to seconds more per step.
        num_samples: Rank to samples; 0 for the others.
        slow_every: The extra compute comes only in every such step.
        jitter: Standard deviation of a rank's compute.
        offset: Rank to seconds by which its clock is ahead.
        warmup: Extra seconds of the first step.
    """

    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": 2})
    num_steps: int = 8
    num_layers: int = 4
    compute: float = 0.4
    data: float = 0.02
    transfer: float = 0.01
    update: float = 0.03
    extra_compute: Mapping[int, float] = field(default_factory=dict)
    extra_data: Mapping[int, float] = field(default_factory=dict)
    num_samples: Mapping[int, int] = field(default_factory=dict)
    slow_every: int = 1
    jitter: float = 0.0
    offset: Mapping[int, float] = field(default_factory=dict)
    warmup: float = 0.0


def generate(recipe: Recipe) -> Trace:
    """Makes the profile of a recipe.

    Args:
        recipe: What every rank does.

    Returns:
        The events of all ranks.
    """
    mesh = Mesh(recipe.mesh)
    layers, axes = recipe.num_layers, list(mesh.sizes)
    names = ("wait", "update", *(f"layer{number}" for number in range(layers)), *axes, "all-reduce", "main")
    random = np.random.default_rng(0)
    steps = np.arange(recipe.num_steps)
    clock_R = np.zeros(mesh.num_ranks)
    starts, ends, bounds = [], [], []
    for step in steps:
        begun_R = clock_R.copy()
        times: list[tuple[np.ndarray, np.ndarray]] = []
        slow = step % recipe.slow_every == 0
        wait_R = recipe.data + _of_rank(recipe.extra_data, mesh) + (recipe.warmup if step == 0 else 0.0)
        clock_R = _advance(clock_R, wait_R, times)
        work_R = recipe.compute + slow * _of_rank(recipe.extra_compute, mesh)
        work_R = np.maximum(work_R + recipe.jitter * random.standard_normal(mesh.num_ranks), 0.0)
        for _ in range(layers):
            clock_R = _advance(clock_R, work_R / layers, times)
            for axis in axes:
                end_R = clock_R.copy()
                for group in mesh.groups(axis):
                    end_R[list(group)] = clock_R[list(group)].max() + recipe.transfer
                times.append((clock_R, end_R))
                clock_R = end_R
        clock_R = _advance(clock_R, np.full(mesh.num_ranks, recipe.update), times)
        starts.append([start for start, _ in times])
        ends.append([end for _, end in times])
        bounds.append((begun_R, clock_R))
    start_SER, end_SER = np.array(starts), np.array(ends)
    bounds_S2R = np.array(bounds)
    ranks = tuple(
        _rank_events(recipe, rank, names, start_SER[..., rank], end_SER[..., rank], bounds_S2R[..., rank])
        for rank in range(mesh.num_ranks)
    )
    return Trace(ranks=ranks, source="generated", engine="torch", mesh=mesh.sizes)


def _of_rank(extra: Mapping[int, float], mesh: Mesh) -> np.ndarray:
    return np.array([extra.get(rank, 0.0) for rank in range(mesh.num_ranks)])


def _advance(clock_R: np.ndarray, seconds_R: np.ndarray, times: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    times.append((clock_R, clock_R + seconds_R))
    return clock_R + seconds_R


def _rank_events(
    recipe: Recipe, rank: int, names: tuple[str, ...], start_SE: np.ndarray, end_SE: np.ndarray, bounds_S2: np.ndarray
) -> RankEvents:
    axes = list(Mesh(recipe.mesh).sizes)
    of_layer = [("compute", None, layer) for layer in range(recipe.num_layers)]
    pattern: list[tuple[str, str | None, int]] = [("data", None, -1)]
    for entry in of_layer:
        pattern += [entry, *(("communication", axis, entry[2]) for axis in axes)]
    pattern.append(("optimizer", None, -1))
    place = {name: index for index, name in enumerate(names)}
    label = {"data": place["wait"], "optimizer": place["update"], "communication": place["all-reduce"]}
    kind = [KINDS.index(kind) for kind, _, _ in pattern]
    name = [label.get(kind, place.get(f"layer{layer}", NONE)) for kind, _, layer in pattern]
    layer_index = [place[f"layer{layer}"] if layer >= 0 else NONE for _, _, layer in pattern]
    axis_index = [place[axis] if axis else NONE for _, axis, _ in pattern]
    num_bytes = [4_000_000 if axis else 0 for _, axis, _ in pattern]
    times, num_steps = start_SE.shape[0], start_SE.shape[0]
    offset = recipe.offset.get(rank, 0.0)
    return RankEvents(
        rank=rank,
        names=names,
        kind_E=np.tile(np.array(kind, np.uint8), times),
        name_E=np.tile(np.array(name, np.int32), times),
        layer_E=np.tile(np.array(layer_index, np.int32), times),
        axis_E=np.tile(np.array(axis_index, np.int32), times),
        lane_E=np.full(times * len(pattern), place["main"], np.int32),
        num_bytes_E=np.tile(np.array(num_bytes, np.int64), times),
        start_E=start_SE.ravel() + offset,
        end_E=end_SE.ravel() + offset,
        step_S=np.arange(num_steps),
        step_start_S=bounds_S2[:, 0] + offset,
        step_end_S=bounds_S2[:, 1] + offset,
        num_samples_S=np.full(num_steps, recipe.num_samples.get(rank, 0), np.int64),
        memory_time_M=np.zeros(0),
        memory_bytes_M=np.zeros(0, np.int64),
    )
