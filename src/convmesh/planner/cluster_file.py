"""Cluster files: reading, checking and writing them; the presets that come with ConvMesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from convmesh.errors import ConfigError, ConvMeshError, raise_all
from convmesh.planner.cluster import SCHEMA_VERSION, WEIGHTED_CLASSES, Cluster, Curve
from convmesh.yaml_file import read_mapping

_PRESETS = Path(__file__).parent / "presets"
_ADAPTER: TypeAdapter[Cluster] = TypeAdapter(Cluster)
_UPDATES = ("sgd", "adamw")


def preset_names() -> tuple[str, ...]:
    """The presets that ``load_cluster`` knows by name."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file.

    Args:
        path: A YAML file, or the name of a preset.

    Returns:
        The cluster.

    Raises:
        ConfigError: If it can't be read, is of another version, or something in it is wrong.
        MistakeList: If several things are wrong; all are listed.
    """
    file = Path(path)
    if str(path) in preset_names():
        file = _PRESETS / f"{path}.yaml"
    fix = f"Measure one with: convmesh calibrate -o {path}; or name a preset: {', '.join(preset_names())}"
    content = read_mapping(file, what="cluster file", fix=fix)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"the cluster file {path} was written for another version of ConvMesh",
            got=f"schema_version {version}",
            expected=SCHEMA_VERSION,
            fix="Measure it again with: convmesh calibrate",
        )
    return parse_cluster(content, where=str(path))


def parse_cluster(content: Mapping[str, Any], *, where: str) -> Cluster:
    """Checks a cluster given as nested mappings.

    Args:
        content: What a cluster file would hold.
        where: The file, for messages.

    Returns:
        The cluster.

    Raises:
        ConfigError: If something is wrong.
        MistakeList: If several things are; all are listed.
    """
    try:
        cluster = _ADAPTER.validate_python(dict(content))
    except ValidationError as error:
        mistakes: list[ConvMeshError] = [_explain(detail, where) for detail in error.errors(include_url=False)]
        raise_all(mistakes)
        raise
    raise_all([*_incomplete(cluster, where), *_pointless(cluster, where), *_unsourced(cluster, where)])
    return cluster


def dump_cluster(cluster: Cluster) -> str:
    """Writes a cluster as YAML that ``load_cluster`` reads back to an equal one."""
    content = _ADAPTER.dump_python(cluster, mode="json", exclude_defaults=True)
    for curve in content["compute"]:
        curve["points"] = [_Inline(point) for point in curve["points"]]
    content["measured"] = [_Inline(entry) for entry in content.get("measured", ())]
    links = content.setdefault("links", {})
    for place in ("inside", "between"):
        links[place] = [_Inline(link) for link in links.get(place) or ()]
    told = {"schema_version": cluster.schema_version, "name": cluster.name, "source": cluster.source}
    return yaml.dump(_whole(told | content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


def cluster_schema() -> dict[str, Any]:
    """The JSON Schema of the cluster file, for editors and other tools."""
    schema = _ADAPTER.json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ConvMesh cluster file"}


def _whole(content: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty."""
    content["links"] = {name: value for name, value in content["links"].items() if value != []}
    return {name: value for name, value in content.items() if value not in ([], {})}


class _Inline(dict[str, Any]):
    """A mapping that is written in one line."""


class _Dumper(yaml.SafeDumper):
    """Writes points, links and measured operators in one line each."""


_Dumper.add_representer(
    _Inline, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
)


def _explain(detail: Any, where: str) -> ConfigError:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return ConfigError(f"the setting '{path}' of the cluster file {where} is unknown")
    if detail["type"] in ("missing", "missing_argument"):
        return ConfigError(f"the cluster file {where} lacks '{path}'")
    expected = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    got = repr(detail["input"])
    return ConfigError(
        f"the setting '{path}' of the cluster file {where} is wrong",
        got=got if len(got) < 80 else got[:77] + "...",
        expected=expected,
    )


def _incomplete(cluster: Cluster, where: str) -> Iterator[ConvMeshError]:
    """What no plan can be judged without."""
    known = {curve.operator for curve in cluster.compute}
    if "convolution" not in known:
        yield ConfigError(f"the cluster file {where} has no throughput of convolutions", fix="Add a curve to 'compute'")
    if not known - set(WEIGHTED_CLASSES) - set(_UPDATES):
        yield ConfigError(
            f"the cluster file {where} has no throughput of operators that only move bytes",
            fix="Add a curve of 'copy' or 'elementwise' to 'compute'",
        )
    if cluster.devices_per_node > 1 and not cluster.links.inside:
        yield ConfigError(
            f"the cluster file {where} says nothing of the links inside a node",
            got=f"{cluster.devices_per_node} devices per node",
            fix="Add 'links.inside'",
        )
    if cluster.nodes > 1 and not cluster.links.between:
        yield ConfigError(
            f"the cluster file {where} says nothing of the links between nodes",
            got=f"{cluster.nodes} nodes",
            fix="Add 'links.between'",
        )
    if cluster.device.fixed_bytes >= cluster.device.memory_bytes:
        yield ConfigError(
            f"in the cluster file {where} the engine alone fills the memory of a device",
            got=f"fixed_bytes {cluster.device.fixed_bytes} of memory_bytes {cluster.device.memory_bytes}",
        )


def _pointless(cluster: Cluster, where: str) -> Iterator[ConvMeshError]:
    """Curves without the size over which they are read, or told twice."""
    seen: set[tuple[str, str, str]] = set()
    for curve in cluster.compute:
        key = (curve.operator, curve.dtype, curve.direction)
        named = f"the curve of {curve.operator}, {curve.dtype}, {curve.direction} of the cluster file {where}"
        if key in seen:
            yield ConfigError(f"{named} stands twice")
        seen.add(key)
        size = size_name(curve)
        if any(getattr(point, size) <= 0 for point in curve.points):
            yield ConfigError(f"{named} has a point without '{size}'")


def _unsourced(cluster: Cluster, where: str) -> Iterator[ConvMeshError]:
    links = [*cluster.links.inside, *(cluster.links.between or ())]
    keys = {cluster.source, cluster.device.source, *(curve.source for curve in cluster.compute)}
    keys |= {link.source for link in links}
    for key in sorted(keys - {""} - set(cluster.sources)):
        yield ConfigError(
            f"the cluster file {where} names a source that it does not explain",
            got=f"'{key}'",
            fix=f"Add '{key}: ...' to 'sources'",
        )


def size_name(curve: Curve) -> str:
    """Over what a curve is read: ``flops`` or ``num_bytes``."""
    return "flops" if curve.operator in WEIGHTED_CLASSES else "num_bytes"
