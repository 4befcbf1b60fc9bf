"""The largest number that fits, found in few questions."""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(fits: Callable[[int], bool], most: int, guess: int) -> int:
    """The largest number that fits, asked near a guess first.

    Args:
        fits: Whether a number fits; 0 is known to, and if one does, all below should.
        most: The largest that may be asked for.
        guess: Where to begin.

    Returns:
        The number; if ``fits`` is not as it should be, one that fits while the next does not.
    """
    low, high, step, probe = 0, most, 1, guess
    bracketed = False
    while low < high:
        probe = min(max(probe, low + 1), high)
        if fits(probe):
            bracketed, low = bracketed or high < most, probe
        else:
            bracketed, high = bracketed or low > 0, probe - 1
        probe = (low + high + 1) // 2 if bracketed else low + step if low else high - step
        step *= 2
    return low
