"""Whole networks split along channels equal one device to the last digits of float64, and communicate as told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from convmesh.plan.plan import Execution
from tests.multiprocess.ranks import RankPool
from tests.networks_torch import NETWORKS

pytestmark = [pytest.mark.torch, pytest.mark.multiprocess]

Pools = Callable[[str, int], RankPool]
CASE = "tests.multiprocess.channel_cases:networks"
RULE: Any = "rule"
ALONG = ("softmaxes", "layer_norms", "reductions", "pieces", "gates")

# Plans by hand: uneven and scattered channels, kept inputs, some layers whole.
BY_HAND: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "vgg",
        {
            "features.0": {"split": "out_channels", "partition": ((7, 1, 4), (0, 2, 3, 5, 6))},
            "features.3": {"split": "in_channels", "partition": (9, 3)},
            "head.1": {"split": "in_channels", "partition": "round_robin"},
            "head.4": {"split": "in_channels", "output": "whole"},
        },
        {},
    ),
    ("vgg", {"features.*": {"split": "out_channels", "keep_input": True}, "head.1": "out_channels"}, {}),
    ("densenet", {"stem": "out_channels", "layers.1.conv": {"split": "in_channels", "partition": (1, 3)}}, {}),
    ("mobilenet", {"blocks.1.*": "out_channels", "blocks.1.depthwise": "groups", "blocks.2.*": "in_channels"}, {}),
    ("unet", {"*": {"split": "out_channels", "partition": "round_robin"}}, {"channels_last": True}),
    ("squeeze_excite", {"conv?": "out_channels", "norm2": "channels"}, {}),
    ("swish", {"conv1": "out_channels", "act1.*": "whole", "conv3": "in_channels"}, {}),
    ("shufflenet", {"stem": "out_channels", "grouped": "groups", "units.0.conv2": "groups"}, {}),
    ("cnn-small", {"*": "in_channels", "conv1": "whole"}, {"channels_last": True}),
    ("softmaxes", {"conv?": {"split": "out_channels", "partition": "round_robin"}, "softmax": "whole"}, {}),
    ("layer_norms", {"conv1": {"split": "out_channels", "partition": (5, 2)}, "fc1": "out_channels"}, {}),
    ("reductions", {"conv1": {"split": "out_channels", "partition": ((9, 1, 4), (0, 2, 3, 5, 6, 7, 8))}}, {}),
    ("pieces", {"conv1": "out_channels", "conv2": {"split": "in_channels", "partition": (1, 14)}}, {}),
    (
        "pieces",
        {"conv1": {"split": "out_channels", "partition": ((15, 7, 2, 3, 4, 10, 11, 12), (0, 8, 1, 9, 5, 13, 6, 14))}},
        {"channels_last": True},
    ),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_networks_by_rule_equal_one_device(rank_pool: Pools, num_ranks: int) -> None:
    names = [*NETWORKS, "norms", "random", "slopes", "scales", "tied", *ALONG]
    cases = [(name, RULE, {"channels_last": number % 2 == 0}) for number, name in enumerate(names)]
    cases.append(("along_blocks", RULE, {"execution": Execution(recompute=("*",))}))
    cases += [(name, RULE, {"opaque": "gather"}) for name in ("opaque_module", "opaque_function")]
    check(rank_pool("torch", num_ranks).run(CASE, cases=cases, timeout_seconds=110), cases)


def test_networks_by_hand_equal_one_device(rank_pool: Pools) -> None:
    check(rank_pool("torch", 2).run(CASE, cases=BY_HAND, timeout_seconds=110), BY_HAND)


def check(answers: list[list[Any]], cases: list[Any]) -> None:
    for rank, of_rank in enumerate(answers):
        for case, answer in zip(cases, of_rank, strict=True):
            assert not isinstance(answer, str), (case, answer)
            worst = max(answer["errors"].items(), key=lambda item: item[1])
            # A batch norm of few values multiplies rounding.
            assert worst[1] < 1e-9, (rank, case, worst)
            assert answer["counted"] == answer["told"], (rank, case, answer)
            assert any(split not in ("whole", "channels") for split, _, _ in answer["splits"].values())


def test_what_cannot_be_split_exactly_is_refused(rank_pool: Pools) -> None:
    cases = [
        ("opaque_module", RULE, {}),
        ("opaque_function", RULE, {}),
        ("fixed_reshape", RULE, {}),
        ("tied", {"conv2": "out_channels"}, {}),
    ]
    for answers in rank_pool("torch", 2).run(CASE, cases=cases):
        module, function, reshape, tied = answers
        assert "no rule for aten.cumsum.default (unknown)" in module
        assert "opaque: gather" in module
        assert "no rule for aten.cumsum.default (cumsum)" in function
        assert "got shape (2, 2048), expected 1024 channels" in reshape
        assert "x.shape" in reshape
        assert "conv2 can't be split by 'out_channels': its module is called several times" in tied


def test_replicas_are_made_equal_where_their_bits_may_differ(rank_pool: Pools) -> None:
    for rank, answer in enumerate(rank_pool("torch", 2).run("tests.multiprocess.channel_cases:equalize")):
        for name, added in answer["added"].items():
            assert added == (rank if name in answer["split"] else 0), name
        assert answer["split"] == ["conv1.bias", "conv1.weight", "gamma"]
        (count,) = answer["counted"]
        assert (count.kind, count.number, count.num_bytes) == ("broadcast", 1, 4 * answer["num_whole"])
