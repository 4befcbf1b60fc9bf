"""The graph of a run's network, read anew or taken from the cache, and which plans its engine refuses."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convmesh.config import RunConfig
from convmesh.data.channels import regrouped_shape, regrouping_of
from convmesh.data.files import cache_root
from convmesh.data.open import open_data
from convmesh.engines import load_engine
from convmesh.engines.tracing import trace
from convmesh.errors import ConfigError, ConvMeshError, DataError, ModelError
from convmesh.graph import Graph
from convmesh.plan import ResolvedPlan
from convmesh.training.run_folder import write_atomically
from convmesh.version import __version__

ImageShape = tuple[int, int, int]

_OPTIONS_FIX = "Or give --image-shape HxWxC and --classes K, which need no data"
_READ_BY = (
    "graph/*.py", "engines/*.py", "engines/{engine}/trace*.py", "engines/{engine}/calls.py", "models/{engine}/*.py",
)  # fmt: skip


def read_graph(
    run: RunConfig,
    *,
    batch: int = 1,
    image_shape_HWC: ImageShape | None = None,
    num_classes: int | None = None,
) -> Graph:
    """Builds the network of a run and reads its graph.

    Args:
        run: The run; of its data the shape of the images, the number of classes and regrouped channels are used.
        batch: Samples of the batch that shapes are for.
        image_shape_HWC: Shape of the images; default the data's.
        num_classes: Number of classes; default the data's.

    Returns:
        The graph.

    Raises:
        DataError: If shape or classes are not given and the data is missing.
        ConvMeshError: If the network can't be built or read.
    """
    shape_HWC, count = _facts(run, image_shape_HWC, num_classes)
    return _read(run, batch, shape_HWC, count)


def cached_graph(
    run: RunConfig, *, batch: int, image_shape_HWC: ImageShape | None = None, num_classes: int | None = None
) -> Graph:
    """The same, kept in the cache folder for networks that ConvMesh ships: they need no framework the next time.

    Your own network is read anew each time, since its code may have changed.

    Args:
        run: The run.
        batch: Samples of the batch that shapes are for.
        image_shape_HWC: Shape of the images; default the data's.
        num_classes: Number of classes; default the data's.

    Returns:
        The graph.

    Raises:
        DataError: If shape or classes are not given and the data is missing.
        ConvMeshError: If the network can't be built or read.
    """
    shape_HWC, count = _facts(run, image_shape_HWC, num_classes)
    if run.model.name is None:
        return _read(run, batch, shape_HWC, count)
    path = cache_root() / "graphs" / f"{run.model.name}-{_key(run, batch, shape_HWC, count)}.json"
    try:
        return Graph.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        graph = _read(run, batch, shape_HWC, count)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, graph.to_json())
    except (OSError, ConvMeshError):
        return graph  # A cache that can't be written costs time only.
    return graph


def refuses_of(
    run: RunConfig, *, image_shape_HWC: ImageShape | None = None, num_classes: int | None = None
) -> Callable[[ResolvedPlan], str | None] | None:
    """What the engine says to a plan of a run's network: why it can't run it, or None.

    Args:
        run: The run.
        image_shape_HWC: Shape of the images; default the data's.
        num_classes: Number of classes; default the data's.

    Returns:
        The function, which builds the network when it is first called; None for networks that ConvMesh ships, which
        are made of layers that every plan can split.
    """
    if run.model.name is not None:
        return None

    @functools.cache
    def network() -> Any:
        return _built(run, *_facts(run, image_shape_HWC, num_classes))

    def refuses(resolved: ResolvedPlan) -> str | None:
        errors = importlib.import_module(f"convmesh.engines.{run.engine}.parallelize").refusals(network(), resolved)
        if not errors:
            return None
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        return f"on {run.engine} {errors[0].what.removeprefix('on MindSpore ')}{more}"

    return refuses


def _read(run: RunConfig, batch: int, image_shape_HWC: ImageShape, num_classes: int) -> Graph:
    network = _built(run, image_shape_HWC, num_classes)
    regrouping = regrouping_of(run.data.channels, image_shape_HWC=image_shape_HWC)
    height, width, num_channels = regrouped_shape(regrouping, image_shape_HWC)
    return trace(network, (batch, num_channels, height, width))


def _built(run: RunConfig, image_shape_HWC: ImageShape, num_classes: int) -> Any:
    engine, num_channels = load_engine(run.engine), image_shape_HWC[2]
    model = dataclasses.replace(run.model, weights=None)  # A graph has no values.
    network = engine.build_network(model, num_classes=num_classes, num_channels=num_channels, seed=run.train.seed)
    regrouping = regrouping_of(run.data.channels, image_shape_HWC=image_shape_HWC)
    if regrouping is None:
        return network
    return engine.regroup_channels(network, regrouping, image_shape_HWC=image_shape_HWC)


def _key(run: RunConfig, batch: int, image_shape_HWC: ImageShape, num_classes: int) -> str:
    """Changes with whatever a graph depends on, the code that reads it included."""
    root = Path(__file__).parents[1]
    patterns = [pattern.format(engine=run.engine) for pattern in _READ_BY]
    sources = sorted(path for pattern in patterns for path in root.glob(pattern))
    try:
        framework = importlib.metadata.version(run.engine)
    except importlib.metadata.PackageNotFoundError:
        framework = "none"
    facts = [run.engine, framework, __version__, run.model.name, dict(run.model.args), batch, image_shape_HWC]
    facts += [num_classes, str(run.data.channels)]
    digest = hashlib.sha256(json.dumps(facts, default=str).encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _facts(run: RunConfig, image_shape_HWC: ImageShape | None, num_classes: int | None) -> tuple[ImageShape, int]:
    if image_shape_HWC is not None and num_classes is not None:
        return image_shape_HWC, num_classes
    shape_HWC, count = _of_data(run)
    return image_shape_HWC or shape_HWC, num_classes or count


def _of_data(run: RunConfig) -> tuple[tuple[int, int, int], int]:
    try:
        data = open_data(run.data)
    except (DataError, ConfigError) as error:
        fix = f"{error.fix}. {_OPTIONS_FIX}" if error.fix else _OPTIONS_FIX.removeprefix("Or ").capitalize()
        raise type(error)(error.what, got=error.got, expected=error.expected, fix=fix) from None
    except ConvMeshError as error:
        raise DataError(str(error).rstrip("."), fix=_OPTIONS_FIX) from None
    return data.image_shape_HWC, len(data.class_names)
