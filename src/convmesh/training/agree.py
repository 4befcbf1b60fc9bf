"""One verdict for all ranks: where one rank fails, all end with its error, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from convmesh.errors import ConvMeshError

Result = TypeVar("Result")


class OtherRankError(ConvMeshError):
    """What one rank found and every rank ends with."""


def agree(action: Callable[[], Result], all_gather: Callable[[Any], list[Any]]) -> Result:
    """Runs something that may fail on some ranks only; all ranks must call.

    Args:
        action: Must not communicate.
        all_gather: Gathers a small value of every rank, in rank order.

    Returns:
        What ``action`` returned on this rank.

    Raises:
        ConvMeshError: The rank's own error.
        OtherRankError: On a rank without one, the error of the first rank that failed.
    """
    error: ConvMeshError | None = None
    result: Result | None = None
    try:
        result = action()
    except ConvMeshError as own:
        error = own
    verdicts: list[str | None] = all_gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, verdict in enumerate(verdicts):
        if verdict is not None:
            raise OtherRankError(f"rank {rank} failed: {verdict.rstrip('.')}")
    return result  # type: ignore[return-value]
