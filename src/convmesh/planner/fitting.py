"""Figures of a cluster file from what was measured: alpha and beta of collectives, seconds of operators, spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AlphaBeta:
    """A straight line through measured times.

    Args:
        alpha_seconds: Seconds that do not depend on the size.
        seconds_per_byte: Seconds per byte.
    """

    alpha_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Seconds for a size."""
        return self.alpha_seconds + num_bytes * self.seconds_per_byte


def fit_alpha_beta(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fits ``alpha + bytes * beta``, neither below zero, by least squares of the relative error.

    Relative, since sizes span four orders of magnitude and a plan has many small collectives and few large ones.

    Args:
        num_bytes: Size of each measurement.
        seconds: Its seconds, above 0.

    Returns:
        The line.
    """
    from scipy.optimize import nnls

    sizes, times = np.asarray(num_bytes, float), np.asarray(seconds, float)
    unit = max(float(sizes.max()), 1.0)  # Columns of one magnitude keep the system well conditioned.
    (alpha, beta), _ = nnls(np.column_stack([1 / times, sizes / unit / times]), np.ones(len(times)))
    return AlphaBeta(float(alpha), float(beta) / unit)


def spread_of(samples: Sequence[float]) -> float:
    """Interquartile range as a share of the median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / middle) if middle > 0 else 0.0


def typical(samples: Sequence[float], *, shares_cores: bool) -> float:
    """The seconds that stand for repeated measurements.

    Args:
        samples: Seconds, of all ranks and rounds.
        shares_cores: Whether more threads computed than there are cores. Then short work either runs through or waits
            for its turn, and only the mean adds up to what many pieces of work take; else the median leaves out what
            had nothing to do with it.

    Returns:
        The seconds; 0 for no samples.
    """
    if not samples:
        return 0.0
    return float(np.mean(samples) if shares_cores else np.median(samples))


@dataclass(frozen=True)
class Spare:
    """What a process holds beside tensors.

    Args:
        fixed_bytes: Whatever their size.
        activation_share: Per byte of activations and what passes.
        parameter_share: Per byte of parameters, gradients and optimizer state.
    """

    fixed_bytes: int = 0
    activation_share: float = 0.0
    parameter_share: float = 0.0


def fit_spare(held: Sequence[float], activations: Sequence[float], parameters: Sequence[float]) -> Spare:
    """Finds what processes held beyond their tensors: a constant and a share of each kind, none below zero.

    Args:
        held: Bytes that each held.
        activations: Bytes of its activations and what passes.
        parameters: Bytes of its parameters, gradients and optimizer state.

    Returns:
        What explains them best.
    """
    if not held:
        return Spare()
    from scipy.optimize import nnls

    unit = 2.0**20
    columns = np.column_stack([np.ones(len(held)), np.asarray(activations) / unit, np.asarray(parameters) / unit])
    beyond = np.asarray(held, float) / unit - columns[:, 1] - columns[:, 2]
    (constant, of_activations, of_parameters), _ = nnls(columns, np.maximum(beyond, 0.0))
    return Spare(int(constant * unit), float(of_activations), float(of_parameters))
