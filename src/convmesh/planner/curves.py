"""Seconds over size: what a cluster's curves say of work that was not measured itself.

Between points, seconds are interpolated on a log-log scale, which keeps any power law. Beyond the largest point the
throughput stays; below the smallest, the slope of the first two points goes on, at least flat and at most proportional.
A larger size never takes less: of points that a measurement has turned round, the slower one counts.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from convmesh.planner.cluster import WEIGHTED_CLASSES, Cluster, Curve, Direction, OperatorClass
from convmesh.planner.cluster_file import size_name

Floats = npt.NDArray[np.float64]

FALLBACKS: Mapping[OperatorClass, tuple[OperatorClass, ...]] = {
    "convolution": ("dense",),
    "pointwise": ("convolution", "dense"),
    "grouped": ("convolution",),
    "depthwise": ("grouped", "convolution"),
    "convolution_transposed": ("convolution",),
    "dense": ("pointwise", "convolution"),
    "norm": ("elementwise", "copy", "pooling"),
    "pooling": ("elementwise", "copy", "norm"),
    "elementwise": ("copy", "norm", "pooling"),
    "copy": ("elementwise", "norm", "pooling"),
    "sgd": (),
    "adamw": (),
}
"""Class to those whose curves stand in for it, the nearest first."""


class Interpolation:
    """One curve.

    Args:
        points: Size and seconds of each point; sizes and seconds above 0.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        slowest: dict[float, float] = {}
        for size, seconds in zip(
            (size for size, _ in ordered), accumulate((seconds for _, seconds in ordered), max), strict=True
        ):
            slowest[size] = seconds
        self._sizes = [math.log(size) for size in slowest]
        self._seconds = [math.log(seconds) for seconds in slowest.values()]
        self._first_slope = min(1.0, self._slope(0)) if len(slowest) > 1 else 1.0

    def seconds(self, size: float) -> float:
        """Seconds for a size; 0 for nothing."""
        if size <= 0:
            return 0.0
        place = math.log(size)
        if place <= self._sizes[0]:
            return math.exp(self._seconds[0] + self._first_slope * (place - self._sizes[0]))
        if place >= self._sizes[-1]:
            return math.exp(self._seconds[-1] + place - self._sizes[-1])
        index = bisect.bisect_right(self._sizes, place) - 1
        return math.exp(self._seconds[index] + self._slope(index) * (place - self._sizes[index]))

    def many(self, sizes: Floats) -> Floats:
        """Seconds of many sizes at once, but for rounding the same."""
        found = np.zeros(len(sizes))
        some = sizes > 0
        place = np.log(sizes[some])
        below = self._first_slope * np.minimum(place - self._sizes[0], 0.0)
        above = np.maximum(place - self._sizes[-1], 0.0)
        found[some] = np.exp(np.interp(place, self._sizes, self._seconds) + below + above)
        return found

    def _slope(self, index: int) -> float:
        rise = self._seconds[index + 1] - self._seconds[index]
        return rise / (self._sizes[index + 1] - self._sizes[index])


class Curves:
    """All curves of a cluster, with what stands in for those that it lacks.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._curves = {(curve.operator, curve.dtype, curve.direction): curve for curve in cluster.compute}
        self._built: dict[str, Interpolation] = {}
        self._found: dict[tuple[str, str, str], Curve | None] = {}

    def find(self, operator: OperatorClass, dtype: str, direction: Direction) -> Curve | None:
        """The curve on which a class is looked up.

        Of one class, the wanted type and direction come first, then the other direction, then other types; only then
        another class.

        Args:
            operator: The class.
            dtype: Type in which it computes.
            direction: Forward or backward.

        Returns:
            The curve; None only for updates, which a cluster may have no curve of.
        """
        key = (operator, dtype, direction)
        if key not in self._found:
            other = "forward" if direction == "backward" else "backward"
            wanted = [
                (name, kind, way)
                for name in (operator, *FALLBACKS[operator])
                for kind in dict.fromkeys((dtype, "float32", "float16", "bfloat16", "float64"))
                for way in (direction, other)
            ]
            self._found[key] = next((self._curves[entry] for entry in wanted if entry in self._curves), None)
        return self._found[key]

    def seconds(
        self, operator: OperatorClass, dtype: str, direction: Direction, *, flops: float, num_bytes: float
    ) -> float:
        """Seconds of some work: what its FLOPs take, or what its bytes take if that is more.

        Args:
            operator: Its class.
            dtype: Type in which it computes.
            direction: Forward or backward.
            flops: As `convmesh.graph.costs` counts them.
            num_bytes: As `convmesh.planner.signature` counts them.

        Returns:
            The seconds.
        """
        curve = self.find(operator, dtype, direction)
        if curve is None:
            return self.seconds("copy", dtype, "forward", flops=0, num_bytes=num_bytes)
        if curve.operator not in WEIGHTED_CLASSES:
            return self._on(curve).seconds(num_bytes)
        moving = self.find("copy", dtype, "forward")
        least = self._on(moving).seconds(num_bytes) if moving is not None else 0.0
        return max(self._on(curve).seconds(flops), least)

    def many(
        self, operator: OperatorClass, dtype: str, direction: Direction, *, flops: Floats, num_bytes: Floats
    ) -> Floats:
        """Seconds of many pieces of work of one class at once, but for rounding as ``seconds`` gives them.

        Args:
            operator: Their class.
            dtype: Type in which they compute.
            direction: Forward or backward.
            flops: Of each piece.
            num_bytes: Of each piece.

        Returns:
            The seconds of each.
        """
        curve = self.find(operator, dtype, direction)
        if curve is None:
            return self.many("copy", dtype, "forward", flops=flops, num_bytes=num_bytes)
        if curve.operator not in WEIGHTED_CLASSES:
            return self._on(curve).many(num_bytes)
        moving = self.find("copy", dtype, "forward")
        seconds = self._on(curve).many(flops)
        return seconds if moving is None else np.maximum(seconds, self._on(moving).many(num_bytes))

    def _on(self, curve: Curve) -> Interpolation:
        key = f"{curve.operator} {curve.dtype} {curve.direction}"
        if key not in self._built:
            size = size_name(curve)
            self._built[key] = Interpolation((getattr(point, size), point.seconds) for point in curve.points)
        return self._built[key]
