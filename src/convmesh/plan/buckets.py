"""Which gradients travel together: the engines' rules, as pure integers.

Buckets count from 0 for the first parameters; engines reduce the last one first, since the backward finishes the
gradients of the last layers first.
"""

from __future__ import annotations

from collections.abc import Sequence


def fill_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> tuple[int, ...]:
    """PyTorch's rule: from the first tensor on, a bucket is closed once it holds so many bytes.

    Args:
        sizes_bytes: Size of each gradient, in the order of the parameters.
        bucket_bytes: When a bucket is closed.

    Returns:
        The bucket of each tensor of one data type.
    """
    found, bucket, filled = [], 0, 0
    for size in sizes_bytes:
        found.append(bucket)
        filled += size
        if filled >= bucket_bytes:
            bucket, filled = bucket + 1, 0
    return tuple(found)


def pack_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> tuple[int, ...]:
    """ConvMesh's rule on MindSpore: from the last tensor on, a bucket is closed before it would get larger.

    Args:
        sizes_bytes: Size of each gradient, in the order of the parameters.
        bucket_bytes: The largest bucket; a larger tensor is one on its own.

    Returns:
        The bucket of each tensor.
    """
    found, bucket, filled = [], 0, 0
    for size in reversed(sizes_bytes):
        if filled and filled + size > bucket_bytes:
            bucket, filled = bucket + 1, 0
        filled += size
        found.append(bucket)
    return tuple(bucket - entry for entry in reversed(found))
