"""ConvMesh: hybrid parallel training of convolutional networks on MindSpore and PyTorch.

Importing ConvMesh loads neither framework; names are looked up when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from convmesh.api import PreparedRun, TrainResult, prepare, train
    from convmesh.config import RunConfig, config_schema, load_config
    from convmesh.errors import ConvMeshError
    from convmesh.mesh import Mesh

_HOMES = {
    "ConvMeshError": "convmesh.errors",
    "Mesh": "convmesh.mesh",
    "PreparedRun": "convmesh.api",
    "RunConfig": "convmesh.config",
    "TrainResult": "convmesh.api",
    "config_schema": "convmesh.config",
    "load_config": "convmesh.config",
    "prepare": "convmesh.api",
    "train": "convmesh.api",
}

__all__ = [
    "ConvMeshError",
    "Mesh",
    "PreparedRun",
    "RunConfig",
    "TrainResult",
    "config_schema",
    "load_config",
    "prepare",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'convmesh' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
