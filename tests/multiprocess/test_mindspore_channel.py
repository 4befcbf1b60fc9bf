"""MindSpore networks split along channels equal one device, and communicate what was told beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("mindspore")

from tests.multiprocess.ranks import RankPool

pytestmark = [pytest.mark.mindspore, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
OPERATORS = "tests.multiprocess.mindspore_channel_cases:operators"
NETWORKS = "tests.multiprocess.mindspore_channel_cases:networks"


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
    settings: dict[str, Any] = {"has_bias": draw.random() < 0.7}
    args: tuple[Any, ...] = (num_in, num_out)
    splits = ["out_channels", "in_channels", "whole"]
    if kind != "dense":
        size = [draw.randint(1, 4) for _ in range(num_dims)]
        settings["pad_mode"] = "pad"
        settings["padding"] = draw.randint(0, 1)
        settings["stride"] = _each(draw, num_dims, 1, 3)
        # MindSpore's three-dimensional kernels on the CPU know neither dilation nor groups.
        settings["dilation"] = 1 if num_dims == 3 else _each(draw, num_dims, 1, 2)
        groups = draw.choice([1, 1, num_ranks, num_ranks + 1]) if num_dims < 3 else 1
        if groups > 1:
            num_in, num_out = groups * draw.randint(1, 2), groups * draw.randint(1, 3)
            splits = ["groups", "groups", "whole"]
            settings["group"] = groups
        args = (num_in, num_out, size[0] if num_dims == 1 else tuple(size))
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
    }


def _each(draw: random.Random, num_dims: int, low: int, high: int) -> Any:
    values = tuple(draw.randint(low, high) for _ in range(num_dims))
    return values[0] if num_dims == 1 else values


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_weighted_operators_equal_one_device(rank_pool: Pools, num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    cases_ = [random_case(draw, num_ranks) for _ in range(18 if num_ranks == 2 else 6)]
    seen = set()
    for rank, answers in enumerate(rank_pool("mindspore", num_ranks).run(OPERATORS, timeout_seconds=300, cases=cases_)):
        for case, answer in zip(cases_, answers, strict=True):
            assert not isinstance(answer, str), (case, answer)
            assert max(answer["errors"].values()) < 2e-5, (rank, case, answer)
            assert answer["counted"] == answer["told"], (rank, case, answer)
            seen.add((case["kind"], answer["splits"]["op"][0]))
    if num_ranks == 2:
        assert {"out_channels", "in_channels", "groups"} <= {split for _, split in seen}
        assert {"convolution", "transposed", "dense"} <= {kind for kind, _ in seen}


def test_networks_equal_one_device(rank_pool: Pools) -> None:
    # ResNet-18 is trained in test_mindspore_channel_training.
    names = ["cnn-small", "vgg", "mobilenet", "densenet", "shufflenet", "squeeze_excite", "unet", "swish", "norms"]
    names.append("softmaxes")
    cases = [(name, "rule", {}) for name in names]
    for answers in rank_pool("mindspore", 2).run(NETWORKS, timeout_seconds=400, cases=cases):
        for name, answer in zip(names, answers, strict=True):
            assert not isinstance(answer, str), (name, answer)
            assert max(answer["errors"].values()) < 1e-4, (name, answer)
            assert answer["counted"] == answer["told"], (name, answer)
            assert any(split not in ("whole", "channels") for split, _, _ in answer["splits"].values()), name


def test_operators_along_channels_equal_one_device_without_shared_memory(rank_pool: Pools) -> None:
    for (answer,) in rank_pool("mindspore", 3).run(NETWORKS, timeout_seconds=120, cases=[("softmaxes", "rule", {})]):
        assert not isinstance(answer, str), answer
        assert max(answer["errors"].values()) < 1e-4, answer
        assert answer["counted"] == answer["told"], answer
        splits = answer["splits"]
        assert [splits[name] for name in ("softmax", "log", "norm")] == [("channels", "none", "none")] * 3, splits
        assert splits["mask"] == ("whole", "gather", "copy"), splits


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 3, 2)], ids=["all-gather", "all-reduce"])
def test_equal_collectives_are_not_merged(rank_pool: Pools, sizes: tuple[int, ...]) -> None:
    # The compiler would make one of two gatherings of the same tensor: one less than the plan has told.
    out = {"split": "out_channels", "partition": sizes}
    case = (
        "twice",
        {"conv1": out, "conv2": out, "conv3": out, "conv4": {"split": "in_channels", "output": "whole"}},
        {},
    )
    for (answer,) in rank_pool("mindspore", 3).run(NETWORKS, timeout_seconds=120, cases=[case]):
        assert not isinstance(answer, str), answer
        assert max(answer["errors"].values()) < 2e-5, answer
        assert answer["told"]["all-gather"][0] == 4
        assert answer["counted"] == answer["told"], answer
