"""Operators split along channels equal one device, and communicate what was told beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
OPERATORS = "tests.multiprocess.channel_cases:operators"


def random_partition(draw: random.Random, num_channels: int, num_ranks: int) -> Any:
    kind = draw.choice(["contiguous", "round_robin", "sizes", "lists"])
    if kind in ("contiguous", "round_robin"):
        return kind
    cuts = sorted(draw.sample(range(1, num_channels), num_ranks - 1))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, num_channels], strict=True)]
    if kind == "sizes":
        return tuple(sizes)
    channels = draw.sample(range(num_channels), num_channels)
    return tuple(tuple(channels.pop() for _ in range(size)) for size in sizes)


def random_case(draw: random.Random, num_ranks: int) -> dict[str, Any]:
    kind = draw.choice(["convolution", "convolution", "transposed", "dense"])
    num_dims = 0 if kind == "dense" else draw.choice([1, 2, 2, 3])
    num_in, num_out = draw.randint(num_ranks, 9), draw.randint(num_ranks, 9)
    settings: dict[str, Any] = {"bias": draw.random() < 0.7}
    args: tuple[Any, ...] = (num_in, num_out)
    splits = ["out_channels", "in_channels", "whole"]
    if kind != "dense":
        size = [draw.randint(1, 4) for _ in range(num_dims)]
        stride = [draw.randint(1, 3) for _ in range(num_dims)]
        settings["stride"] = stride
        settings["padding"] = [draw.randint(0, 2) for _ in range(num_dims)]
        settings["dilation"] = [draw.randint(1, 2) for _ in range(num_dims)]
        if kind == "transposed":
            settings["output_padding"] = [draw.randint(0, s - 1) for s in stride]
        groups = draw.choice([1, 1, num_ranks, num_ranks + 1])
        if groups > 1:
            num_in, num_out = groups * draw.randint(1, 2), groups * draw.randint(1, 3)
            splits = ["groups", "groups", "whole"]
            settings["groups"] = groups
        args = (num_in, num_out, size)
    split = draw.choice(splits)
    choice: dict[str, Any] = {"split": split, "keep_input": draw.random() < 0.3}
    if split in ("out_channels", "in_channels"):
        choice["partition"] = random_partition(draw, num_out, num_ranks)
    if split == "in_channels" and draw.random() < 0.3:
        choice["output"] = "whole"
    entries: dict[str, Any] = {"op": choice}
    if draw.random() < 0.8:
        entries["first"] = {"split": "out_channels", "partition": random_partition(draw, num_in, num_ranks)}
    return {
        "kind": kind,
        "num_dims": num_dims,
        "first": (3, num_in, *([1] if num_dims else [])),
        "args": args,
        "settings": settings,
        "shape": (2, 3, *[draw.randint(7, 9) for _ in range(num_dims)]),
        "entries": entries,
        "channels_last": num_dims == 2 and draw.random() < 0.5,
    }


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_weighted_operators_equal_one_device(rank_pool: Pools, num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    cases = [random_case(draw, num_ranks) for _ in range(24)]
    seen = set()
    for rank, answers in enumerate(rank_pool("torch", num_ranks).run(OPERATORS, cases=cases)):
        for case, answer in zip(cases, answers, strict=True):
            assert max(answer["errors"].values()) < 1e-12, (rank, case, answer)
            assert answer["counted"] == answer["told"], (rank, case, answer)
            seen.add((case["kind"], answer["splits"]["op"][0]))
    assert {"out_channels", "in_channels", "groups"} <= {split for _, split in seen}
    assert {"convolution", "transposed", "dense"} <= {kind for kind, _ in seen}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_way_to_send_gives_the_same(rank_pool: Pools, num_ranks: int) -> None:
    for errors in rank_pool("torch", num_ranks).run("tests.multiprocess.channel_cases:transports"):
        assert errors.keys() >= {"messages", "native"}
        assert set(errors.values()) == {0.0}
