"""Presets: what they predict against what was published, and that they serve every mesh that they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from planning import candidate_of, resnet

from convmesh.config import parse_config
from convmesh.planner.cluster_file import load_cluster, preset_names
from convmesh.planner.predict import predict
from convmesh.planner.prediction import Training

ROOT = Path(__file__).parents[2]
RESNET50 = resnet((3, 4, 6, 3))
GPU = {"engine": "torch", "per_rank": 256}
NPU = {"engine": "mindspore", "per_rank": 32}


@pytest.mark.parametrize(
    ("preset", "dtype", "how", "num_ranks", "samples_per_second"),
    [
        # https://github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, 8x A100-80G: the
        # preset's 40G model has three quarters of its memory bandwidth.
        ("a100-8", "float32", GPU, 1, 938),
        ("a100-8", "float32", GPU, 8, 7248),
        ("a100-8", "float16", GPU, 1, 2470),
        ("a100-8", "float16", GPU, 8, 16621),
        # https://github.com/mindspore-lab/mindcv, configs/resnet: 31.9 ms per step.
        ("ascend910b-8", "float16", NPU, 8, 8025),
        # Twice an A100, https://lambdalabs.com/blog/nvidia-h100-gpu-deep-learning-performance-analysis
        ("h200-8", "float16", GPU, 1, 4940),
    ],
)
def test_presets_give_the_throughput_that_was_published(
    preset: str, dtype: Any, how: dict[str, Any], num_ranks: int, samples_per_second: float
) -> None:
    training = Training(engine=how["engine"], global_batch=num_ranks * how["per_rank"], compute_dtype=dtype)
    found = predict(candidate_of(RESNET50, axes={"data": num_ranks}, training=training), load_cluster(preset))
    assert found.samples_per_second == pytest.approx(samples_per_second, rel=0.13)


@pytest.mark.parametrize("name", preset_names())
def test_presets_know_every_link_that_their_ranks_need(name: str) -> None:
    cluster = load_cluster(name)
    num_ranks = cluster.nodes * cluster.devices_per_node
    training = Training(engine=cluster.engine or "torch", global_batch=num_ranks)
    for axes in ({"data": num_ranks}, {"data": num_ranks // 2, "channel": 2}, {"data": num_ranks // 4, "channel": 4}):
        found = predict(candidate_of(RESNET50, axes=axes, training=training), cluster)
        assert 0 < found.seconds.communication < found.seconds.total
        assert "; ".join(found.origins.values())


def test_the_example_of_the_documentation_runs() -> None:
    (text,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "en" / "planner.md").read_text("utf-8"), re.M | re.S
    )
    run = parse_config({"engine": "torch", "model": {"name": "resnet50"}, "data": {"source": "digits"}})
    names = {"resolved": candidate_of(RESNET50).resolved, "run": run}
    exec(text, names)
    assert names["prediction"].memory.total > 0  # type: ignore[attr-defined]
