"""Buckets and shards as pure integers; what the launcher refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convmesh.config.schema import DataConfig, ModelConfig, PrecisionConfig, RunConfig
from convmesh.engines import load_launcher
from convmesh.engines.contract import LaunchRequest
from convmesh.engines.mindspore.cluster import first_host
from convmesh.engines.mindspore.partition import own_intervals, plan_buckets


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 100))
def test_buckets_are_filled_from_the_last_tensor(sizes: list[int], bucket_bytes: int) -> None:
    buckets = plan_buckets(sizes, bucket_bytes=bucket_bytes)
    assert list(buckets) == sorted(buckets, reverse=True)
    assert set(buckets) == set(range(1, max(buckets) + 1))
    for bucket in set(buckets):
        held = [size for size, own in zip(sizes, buckets, strict=True) if own == bucket]
        assert sum(held) <= bucket_bytes or len(held) == 1
    for index in range(len(sizes) - 1):
        if buckets[index] != buckets[index + 1]:
            next_one = sum(size for size, own in zip(sizes, buckets, strict=True) if own == buckets[index + 1])
            assert next_one + sizes[index] > bucket_bytes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 9))
def test_intervals_cover_each_element_once_and_evenly(counts: list[int], size: int) -> None:
    of_ranks = [own_intervals(counts, position=position, size=size) for position in range(size)]
    totals = [sum(interval.size for interval in own) for own in of_ranks]
    assert max(totals) - min(totals) <= 1
    for index, count in enumerate(counts):
        covered = sorted(e for own in of_ranks for e in range(own[index].start, own[index].stop))
        assert covered == list(range(count))


def run_config(**precision: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name="cnn-small"), data=DataConfig(source="digits"), precision=PrecisionConfig(**precision)
    )


def test_bfloat16_is_refused_on_cpu() -> None:
    launcher = load_launcher("mindspore")
    assert launcher.check(run_config(compute="float16"), device="cpu", num_ranks=2) == []
    found = launcher.check(run_config(compute="bfloat16", gradient_reduction="bfloat16"), device="cpu", num_ranks=2)
    assert ["convolution" in str(found[0]), "reduce" in str(found[1])] == [True, True]


def test_numpy_2_is_flagged_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    found = load_launcher("mindspore").check(run_config(), device="cpu", num_ranks=1)
    assert "pip install 'numpy>=1.26,<2'" in str(found[0])


def test_pth_is_refused_with_the_way_to_convert_it() -> None:
    run = RunConfig(model=ModelConfig(name="resnet18", weights="resnet18.pth"), data=DataConfig(source="digits"))
    found = load_launcher("mindspore").check(run, device="cpu", num_ranks=1)
    assert "save_file" in str(found[0])


def test_command_and_environment() -> None:
    launcher = load_launcher("mindspore")
    request = LaunchRequest(
        num_ranks=3, port=12345, log_dir=Path("logs"), command=(sys.executable, "-m", "some.module", "--flag")
    )
    command = launcher.command(request)
    assert command[0] == sys.executable
    assert {"--worker_num=3", "--local_worker_num=3", "--master_port=12345", "--join=True"} <= set(command)
    assert command[-3:] == ["-m", "some.module", "--flag"]
    environment = launcher.environment(num_threads=2)
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert environment["OMP_NUM_THREADS"] == "2"


def test_first_host() -> None:
    assert first_host("node[03-05,9],other1") == "node03"
    assert first_host("alone") == "alone"
