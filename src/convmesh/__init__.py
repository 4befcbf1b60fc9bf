"""ConvMesh: hybrid parallel training of convolutional networks on MindSpore and PyTorch.

Importing ConvMesh loads neither framework; names are looked up when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from convmesh.version import __version__ as __version__

if TYPE_CHECKING:
    from convmesh.api import PreparedRun, TrainResult, check, prepare, train, verify
    from convmesh.config import RunConfig, config_schema, load_config
    from convmesh.config.reference import config_reference
    from convmesh.data.adapters import ShardBatches, ShardIds
    from convmesh.data.balanced import BalancedSampler
    from convmesh.data.batching import Batching
    from convmesh.data.fetch import fetch_cifar10, fetch_digits
    from convmesh.data.inspect import DataReport, inspect_data
    from convmesh.data.samplers import RandomSampler, SequentialSampler, StratifiedSampler
    from convmesh.engines.tracing import trace
    from convmesh.errors import ConvMeshError
    from convmesh.geometry import ChannelPartition, ChannelRegrouping
    from convmesh.graph import Graph
    from convmesh.mesh import Mesh
    from convmesh.plan import Execution, Plan
    from convmesh.plan.by_rule import plan_by_rule
    from convmesh.plan.load import dump_plan, load_plan
    from convmesh.report.comparison import compare_runs
    from convmesh.report.doctor import DoctorReport, doctor
    from convmesh.report.html import write_report
    from convmesh.training.standalone import (
        check_sync,
        gather_state,
        load_checkpoint,
        parallelize,
        reduce_gradients,
        regroup_channels,
        regroup_images,
        save_checkpoint,
    )

_HOMES = {
    "BalancedSampler": "convmesh.data.balanced",
    "Batching": "convmesh.data.batching",
    "ChannelPartition": "convmesh.geometry",
    "ChannelRegrouping": "convmesh.geometry",
    "ConvMeshError": "convmesh.errors",
    "DataReport": "convmesh.data.inspect",
    "DoctorReport": "convmesh.report.doctor",
    "Execution": "convmesh.plan",
    "Graph": "convmesh.graph",
    "Mesh": "convmesh.mesh",
    "Plan": "convmesh.plan",
    "PreparedRun": "convmesh.api",
    "RandomSampler": "convmesh.data.samplers",
    "RunConfig": "convmesh.config",
    "SequentialSampler": "convmesh.data.samplers",
    "ShardBatches": "convmesh.data.adapters",
    "ShardIds": "convmesh.data.adapters",
    "StratifiedSampler": "convmesh.data.samplers",
    "TrainResult": "convmesh.api",
    "check": "convmesh.api",
    "check_sync": "convmesh.training.standalone",
    "compare_runs": "convmesh.report.comparison",
    "config_reference": "convmesh.config.reference",
    "config_schema": "convmesh.config",
    "doctor": "convmesh.report.doctor",
    "dump_plan": "convmesh.plan.load",
    "fetch_cifar10": "convmesh.data.fetch",
    "fetch_digits": "convmesh.data.fetch",
    "gather_state": "convmesh.training.standalone",
    "inspect_data": "convmesh.data.inspect",
    "load_checkpoint": "convmesh.training.standalone",
    "load_config": "convmesh.config",
    "load_plan": "convmesh.plan.load",
    "parallelize": "convmesh.training.standalone",
    "plan_by_rule": "convmesh.plan.by_rule",
    "prepare": "convmesh.api",
    "profile": "convmesh.api_profile",
    "reduce_gradients": "convmesh.training.standalone",
    "regroup_channels": "convmesh.training.standalone",
    "regroup_images": "convmesh.training.standalone",
    "save_checkpoint": "convmesh.training.standalone",
    "trace": "convmesh.engines.tracing",
    "train": "convmesh.api",
    "verify": "convmesh.api",
    "write_report": "convmesh.report.html",
}

__all__ = [
    "BalancedSampler",
    "Batching",
    "ChannelPartition",
    "ChannelRegrouping",
    "ConvMeshError",
    "DataReport",
    "DoctorReport",
    "Execution",
    "Graph",
    "Mesh",
    "Plan",
    "PreparedRun",
    "RandomSampler",
    "RunConfig",
    "SequentialSampler",
    "ShardBatches",
    "ShardIds",
    "StratifiedSampler",
    "TrainResult",
    "check",
    "check_sync",
    "compare_runs",
    "config_reference",
    "config_schema",
    "doctor",
    "dump_plan",
    "fetch_cifar10",
    "fetch_digits",
    "gather_state",
    "inspect_data",
    "load_checkpoint",
    "load_config",
    "load_plan",
    "parallelize",
    "plan_by_rule",
    "prepare",
    "profile",
    "reduce_gradients",
    "regroup_channels",
    "regroup_images",
    "save_checkpoint",
    "trace",
    "train",
    "verify",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'convmesh' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
