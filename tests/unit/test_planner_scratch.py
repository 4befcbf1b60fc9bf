"""Scratch memory of MindSpore's convolutions, against what oneDNN was seen to ask for on ResNet-18 at 64x64 pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from planning import candidate_of, cluster_of, plain_network

from convmesh.graph import kinds
from convmesh.graph.graph import Parameter, Shape
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Training
from convmesh.planner.scratch import scratch_bytes, unfolded_bytes
from convmesh.planner.signature import Signature

MIB = 2**20


def convolution(taken: Shape, made: Shape, *, kernel: int = 3, wants: bool = True, **more: Any) -> Signature:
    attributes = kinds.convolution(
        in_channels=taken[1], out_channels=made[1], kernel=(kernel, kernel), padding=((0, 0), (0, 0)), **more
    )
    return Signature(
        kind="convolution",
        attributes=tuple(sorted(attributes.items())),
        input_shapes=(taken,),
        output_shapes=(made,),
        parameters=(Parameter("weight", kinds.convolution_weight(attributes), "weight"),),
        gradients=(wants,),
    )


@pytest.mark.parametrize(
    ("signature", "mib"),
    [
        # The gradient of the input, two threads: 1.125, 0.5625, 0.28125 and 0.140625 MiB in the four stages.
        (convolution((16, 64, 16, 16), (16, 64, 16, 16)), 0.5625),
        (convolution((16, 128, 8, 8), (16, 128, 8, 8)), 0.28125),
        (convolution((16, 64, 16, 16), (16, 128, 8, 8), stride=2), 0.140625),
        (convolution((16, 512, 2, 2), (16, 512, 2, 2)), 0.0703125),
        (convolution((16, 3, 64, 64), (16, 64, 32, 32), kernel=7, stride=2), 0.57421875),
    ],
)
def test_an_image_unfolded_is_as_large_as_was_seen(signature: Signature, mib: float) -> None:
    assert unfolded_bytes(signature) == mib * MIB


def test_one_pixel_needs_no_unfolding_unless_some_are_left_out() -> None:
    assert unfolded_bytes(convolution((16, 64, 8, 8), (16, 256, 8, 8), kernel=1)) == 0
    assert unfolded_bytes(convolution((16, 64, 16, 16), (16, 128, 8, 8), kernel=1, stride=2)) == 64 * 64 * 4


def test_groups_are_unfolded_one_by_one_and_transposed_convolutions_from_their_output() -> None:
    whole, grouped = (unfolded_bytes(convolution((1, 8, 4, 4), (1, 8, 4, 4), groups=groups)) for groups in (1, 4))
    assert whole == 4 * grouped
    transposed = convolution((1, 8, 4, 4), (1, 6, 8, 8), kernel=2, stride=2, transposed=True)
    assert unfolded_bytes(transposed) == 6 * 4 * 16 * 4


def test_every_thread_has_its_own_and_several_sum_the_weight() -> None:
    layer = convolution((16, 512, 2, 2), (16, 512, 2, 2))
    unfolded, weight = unfolded_bytes(layer), 9 * MIB
    assert scratch_bytes([layer, None], num_threads=1) == 3 * unfolded
    assert scratch_bytes([layer, layer], num_threads=2) == 2 * 2 * (3 * unfolded + weight)
    first = convolution((16, 512, 2, 2), (16, 512, 2, 2), wants=False)
    assert scratch_bytes([first], num_threads=1) == 2 * unfolded
    # 256 channels, 8x8 pixels: 0.57 and 5.63 MiB were seen for the gradient of the weight with one and two threads.
    seen = convolution((4, 256, 8, 8), (4, 256, 8, 8))
    rest = min(unfolded_bytes(seen), MIB) + unfolded_bytes(seen)
    assert scratch_bytes([seen], num_threads=1) - rest == pytest.approx(0.57 * MIB, rel=0.02)
    assert scratch_bytes([seen], num_threads=2) - 2 * rest == pytest.approx(5.63 * MIB, rel=0.01)


def test_large_images_are_worked_through_in_pieces_but_for_the_gradient_of_the_input() -> None:
    layer = convolution((2, 64, 56, 56), (2, 64, 56, 56))
    unfolded = unfolded_bytes(layer)
    assert unfolded > 6 * MIB
    assert unfolded + MIB < scratch_bytes([layer], num_threads=1) < unfolded + 5 * MIB


def test_it_counts_with_mindspore_on_the_cpu_alone() -> None:
    def workspace(engine: Any, kind: Any, num_threads: int = 2) -> int:
        cluster = cluster_of()
        device = dataclasses.replace(cluster.device, kind=kind, num_threads=num_threads, workspace_share=0.0)
        candidate = candidate_of(plain_network(), axes={"data": 1}, training=Training(engine=engine, global_batch=4))
        return predict(candidate, dataclasses.replace(cluster, device=device)).memory.workspace

    assert workspace("mindspore", "cpu") > 2 * workspace("mindspore", "cpu", 1) > 0
    assert workspace("mindspore", "ascend") == workspace("torch", "cpu") == 0
