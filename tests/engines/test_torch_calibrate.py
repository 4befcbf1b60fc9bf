"""Measuring on one rank of PyTorch, in this process."""

from __future__ import annotations

from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")

from convmesh.config import RunConfig  # noqa: E402
from convmesh.config.schema import DataConfig, ModelConfig, TrainConfig  # noqa: E402
from convmesh.engines.calibrating import PROBES, Probe  # noqa: E402
from convmesh.engines.contract import World  # noqa: E402
from convmesh.engines.torch.calibrate import _chain, create_calibrator  # noqa: E402
from convmesh.engines.torch.engine import TorchEngine  # noqa: E402
from convmesh.engines.torch.trace import trace  # noqa: E402
from convmesh.mesh import Mesh  # noqa: E402
from convmesh.planner.measuring import curve_signatures, probe_graph  # noqa: E402


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_is_what_the_planner_thinks_it_is(probe: Probe) -> None:
    shape = (probe.num_samples, 3, probe.side, probe.side)
    traced = trace(_chain(probe.num_layers, probe.num_channels), shape)
    told = probe_graph(**asdict(probe))
    assert [(node.kind, node.shape) for node in traced] == [(node.kind, node.shape) for node in told]
    assert traced.num_parameters == told.num_parameters


def test_operators_of_every_class_are_measured() -> None:
    run = RunConfig(
        engine="torch", model=ModelConfig(name="cnn-small"), data=DataConfig(source="digits"),
        train=TrainConfig(global_batch=8, device="cpu"),
    )  # fmt: skip
    world = World(
        rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, mesh=Mesh({"data": 1}), device="cpu", num_threads=1
    )
    calibrator = create_calibrator(TorchEngine(), world, run)
    found = curve_signatures()[:10]
    for signature, times in zip(
        found, calibrator.operators([entry.graph() for entry in found], num_rounds=1), strict=True
    ):
        assert times is not None, signature.text
        assert len(times.forward) == len(times.backward) == 1
        assert min(*times.forward, *times.backward) > 0
