"""Cluster files: read back as written, mistakes told all at once, presets whole and sourced."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from convmesh.errors import ConfigError, MistakeList
from convmesh.planner.cluster import Cluster, Link, Measured
from convmesh.planner.cluster_file import cluster_schema, dump_cluster, load_cluster, parse_cluster, preset_names


def content(**changes: Any) -> dict[str, Any]:
    """A small cluster file."""
    return {
        "schema_version": 1,
        "name": "two cores",
        "sources": {"measured": "by a test"},
        "device": {"name": "CPU", "memory_bytes": "16GiB", "fixed_bytes": "250MiB"},
        "devices_per_node": 2,
        "compute": [
            {"operator": "convolution", "points": [{"flops": 1e9, "num_bytes": 1e7, "seconds": 0.03}]},
            {"operator": "copy", "points": [{"num_bytes": 1e7, "seconds": 0.002}]},
        ],
        "links": {"inside": [{"kind": "all-reduce", "num_ranks": 2, "alpha_seconds": 2e-4, "seconds_per_byte": 5e-10}]},
        **changes,
    }


def test_a_cluster_reads_back_as_written(tmp_path: Path) -> None:
    cluster = parse_cluster(content(), where="here")
    link = Link(kind="broadcast", num_ranks=4, num_groups=2, alpha_seconds=0.1, seconds_per_byte=1e-9, spread=0.2)
    links = dataclasses.replace(cluster.links, between=(link,), adapters_per_node=8)
    cluster = dataclasses.replace(cluster, links=links, nodes=3, measured=(Measured(signature="x", forward_seconds=1),))
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(cluster), "utf-8")
    assert load_cluster(path) == cluster
    assert cluster.device.memory_bytes == 16 * 2**30
    assert cluster.source_of("") == "by a test"


def test_all_mistakes_of_values_are_told_at_once() -> None:
    wrong = content(nodes=0, overlap=1.5, device={"name": "CPU", "memory_bytes": "much"}, colour="blue")
    with pytest.raises(MistakeList) as caught:
        parse_cluster(wrong, where="cluster.yaml")
    told = str(caught.value)
    for part in ("nodes", "overlap", "device.memory_bytes", "'colour' of the cluster file cluster.yaml is unknown"):
        assert part in told


def test_all_that_is_missing_is_told_at_once() -> None:
    curve = {"operator": "dense", "points": [{"num_bytes": 5, "seconds": 1}], "source": "hearsay"}
    device = {"name": "CPU", "memory_bytes": 10, "fixed_bytes": 10}
    with pytest.raises(MistakeList) as caught:
        parse_cluster(content(compute=[curve, curve], nodes=2, links={}, device=device), where="it")
    told = str(caught.value)
    for part in (
        "no throughput of convolutions", "only move bytes", "links inside", "links between", "fills the memory",
        "stands twice", "without 'flops'", "'hearsay'",
    ):  # fmt: skip
        assert part in told


def test_another_version_and_a_missing_file_say_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content(schema_version=7)), "utf-8")
    with pytest.raises(ConfigError, match=r"got schema_version 7.*calibrate"):
        load_cluster(path)
    with pytest.raises(ConfigError, match=r"no cluster file .*nowhere.*name a preset"):
        load_cluster(tmp_path / "nowhere.yaml")


def test_the_schema_knows_every_setting() -> None:
    schema = cluster_schema()
    assert schema["properties"].keys() == {entry.name for entry in dataclasses.fields(Cluster)}
    assert schema["$defs"]["Device"]["properties"]["memory_bytes"]["description"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_whole_and_says_where_each_figure_comes_from(name: str) -> None:
    cluster = load_cluster(name)
    assert load_cluster(name) == parse_cluster(yaml.safe_load(dump_cluster(cluster)), where=name)
    assert all(len(text) > 30 for text in cluster.sources.values())
