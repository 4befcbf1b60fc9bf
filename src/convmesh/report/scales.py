"""Axes of charts: round ticks, positions and labels. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LOG_SPAN = 1000.0
_LARGEST = 1e100  # beyond it sums and quotients of float64 overflow, and nobody can tell points apart


@dataclass(frozen=True)
class Scale:
    """Maps values to positions.

    Args:
        low: Value at ``start``.
        high: Value at ``end``; above ``low``.
        start: Position of ``low``.
        end: Position of ``high``.
        log_base: Base of a logarithmic scale, or 0 for a linear one.
    """

    low: float
    high: float
    start: float
    end: float
    log_base: int = 0

    def position(self, value: float) -> float:
        """The position of a value, rounded to a tenth; values outside stay on the border."""
        low, high, value = (_log(v, self.log_base) if self.log_base else v for v in (self.low, self.high, value))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """About ``count`` round ticks, as position and label."""
        values = log_ticks(self.low, self.high, count, self.log_base) if self.log_base else []
        values = values or nice_ticks(self.low, self.high, count)
        return [(self.position(value), format_number(value)) for value in values]


def fit_scale(
    values: Sequence[float], *, start: float, end: float, log_base: int | None = None, from_zero: bool = False
) -> Scale:
    """A scale that shows all finite values with a little room.

    Args:
        values: The values; those that are not finite are left out.
        start: Position of the low end.
        end: Position of the high end.
        log_base: 2 or 10 for a logarithmic scale, 0 for a linear one; None takes 10 when positive values span more than
            three powers of ten, as a diverging loss does.
        from_zero: Whether a linear scale starts at zero when no value is below it.

    Returns:
        The scale.
    """
    finite = [min(_LARGEST, max(-_LARGEST, value)) for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if log_base is None:
        log_base = 10 if low > 0 and high / low > _LOG_SPAN else 0
    if log_base and low > 0:
        low, high = max(low, 1 / _LARGEST), max(high, 1 / _LARGEST)
        if high / low < log_base:
            low, high = low / log_base, high * log_base
        return Scale(low, high, start, end, log_base)
    room = max(0.06 * (high - low) or abs(high) * 0.1 or 1.0, 1e-9 * max(abs(low), abs(high)), 1 / _LARGEST)
    bottom = 0.0 if low >= 0 and (from_zero or low <= room) else low - room
    return Scale(bottom, high + room, start, end)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round values from ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten.

    Args:
        low: Smallest value that a tick may have.
        high: Largest value that a tick may have.
        count: How many are wanted, roughly.

    Returns:
        The ticks in rising order; at least one unless the range is empty.
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)] or [low]


def log_ticks(low: float, high: float, count: int, base: int) -> list[float]:
    """Powers of a base, thinned to about ``count``.

    Args:
        low: Smallest value that a tick may have; above 0.
        high: Largest value that a tick may have.
        count: How many are wanted, roughly.
        base: The base, 2 or 10 as a rule.

    Returns:
        The ticks in rising order; empty if fewer than two fit.
    """
    first, last = math.ceil(_log(low, base) - 1e-9), math.floor(_log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / max(1, count)))
    ticks = [float(base) ** exponent for exponent in range(first, last + 1, stride)]
    return ticks if len(ticks) > 1 else []


def format_number(value: float) -> str:
    """Writes a number for people: at most four digits that matter, groups of thousands, powers of two above a million.

    Args:
        value: Any number.

    Returns:
        For example ``"12,400"``, ``"0.0125"``, ``"2^24"``, ``"3.2e-07"`` or ``"not a number"``.
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    size = abs(value)
    if size >= 2**17 and math.log2(size).is_integer():
        return f"{'-' if value < 0 else ''}2^{int(math.log2(size))}"
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if value == round(value) or size >= 1000:
        return f"{value:,.0f}"
    digits = 3 - math.floor(math.log10(size)) if size else 0
    return f"{value:.{max(0, digits)}f}".rstrip("0").rstrip(".")


def _log(value: float, base: int) -> float:
    return math.log(max(value, 1e-300)) / math.log(base)
