"""Scratch memory that MindSpore's convolutions keep on the CPU, each its own, from the first update to the last.

MindSpore 2.10 computes a convolution and its two gradients by three primitives of oneDNN that live as long as the
compiled network, and each brings scratch memory of its own. On NCHW tensors oneDNN multiplies matrices, for which each
thread unfolds one image at a time (``im2col``, see its ``src/cpu/gemm_convolution_utils.cpp``), to the channels of a
group x the kernel x height and width of the output. oneDNN has the threads of the rank
(`convmesh.engines.mindspore.threads`).

| primitive | holds per thread |
|---|---|
| gradient of the input | one unfolded image |
| forward | the same, in pieces of at most about 1 MiB |
| gradient of the weight | the same, in pieces of about 3 MiB; and, with several threads, a weight to add up in |

Measured with two threads, as pages that really were in memory: ResNet-18, 16 images of 64x64 pixels: 8, 8 and 94 MiB,
of which 85 MiB are two times the weights; 2 images of 224x224: 98, 19 and 145 MiB. Kernels of one pixel and stride need
nothing unfolded. The slices of 3-D images are unfolded one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from convmesh.graph.graph import DTYPE_BYTES
from convmesh.planner.signature import Signature

_FORWARD_PIECE, _WEIGHT_PIECE = 2**20, 3 * 2**20
"""Of an unfolded image that is worked through in pieces."""


def scratch_bytes(signatures: Iterable[Signature | None], *, num_threads: int) -> int:
    """What the convolutions of a rank keep.

    Args:
        signatures: Of each operator of the network, however often it occurs; None where nothing is computed.
        num_threads: Of the rank.

    Returns:
        Bytes, of all convolutions together.
    """
    layers = (entry for entry in signatures if entry is not None and entry.kind == "convolution")
    return num_threads * sum(_per_thread(layer, num_threads) for layer in layers)


def _per_thread(signature: Signature, num_threads: int) -> int:
    unfolded = unfolded_bytes(signature)
    found = min(unfolded, _FORWARD_PIECE)
    if signature.gradients[0]:
        found += unfolded
    for entry in signature.parameters:
        if entry.role == "weight" and entry.trainable:
            found += min(unfolded, _WEIGHT_PIECE)
            found += entry.num_elements * DTYPE_BYTES[signature.dtype] if num_threads > 1 else 0
    return found


def unfolded_bytes(signature: Signature) -> int:
    """One image of a convolution, unfolded: of each place of the kernel, what it sees."""
    attributes = dict(signature.attributes)
    kernel, stride, groups = attributes["kernel"], attributes["stride"], int(attributes["groups"])
    if set(kernel) == {1} and set(stride) == {1}:
        return 0
    # A transposed convolution is computed as the gradient of one that goes the other way.
    taken, made = signature.input_shapes[0], signature.output_shapes[0]
    seen, places = (made, taken) if attributes["transposed"] else (taken, made)
    num_places = int(math.prod(kernel)) * math.prod(places[2:][-2:])
    return seen[1] // groups * num_places * DTYPE_BYTES[signature.dtype]
