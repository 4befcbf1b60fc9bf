"""What collectives reached of what a cluster file promises: known answers, and names whoever gave them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from benchmarks.contenders.generated_profile import Recipe, generate
from typer.testing import CliRunner

from convmesh.cli.main import app
from convmesh.errors import ConfigError
from convmesh.planner.cluster import Cluster, Link, Links
from convmesh.planner.cluster_file import dump_cluster, load_cluster
from convmesh.profiling.analysis import analyse
from convmesh.profiling.store import save_trace
from convmesh.report.achieved import against_cluster, collective_kind


def cluster(*links: Link, devices_per_node: int = 4) -> Cluster:
    known = load_cluster("cpu-gloo")
    return dataclasses.replace(known, links=Links(inside=links), devices_per_node=devices_per_node, nodes=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-reduce gradients", "all-reduce"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("_reduce_scatter_base", "reduce-scatter"),
        ("hcom_allGather__123_0", "all-gather"),
        ("alltoallv", "all-to-all"),
        ("broadcast parameters", "broadcast"),
        ("hcom_send", None),
    ],
)
def test_kinds_are_known_by_any_name(name: str, kind: str | None) -> None:
    assert collective_kind(name) == kind


def test_what_was_reached_is_measured_against_alpha_and_beta() -> None:
    # 4 MB in 10 ms; the cluster file would have them in 2 ms + 4 ms.
    analysis = analyse(generate(Recipe(mesh={"data": 2}, transfer=0.01)))
    fast = cluster(Link(kind="all-reduce", num_ranks=2, alpha_seconds=0.002, seconds_per_byte=1e-9))

    (reached,) = against_cluster(analysis, fast).values()

    assert reached.bytes_per_second == pytest.approx(4e8)
    assert reached.cluster_bytes_per_second == pytest.approx(4e6 / 0.006)
    assert reached.share == pytest.approx(0.6)
    assert reached.source == fast.source_of("")


def test_late_ranks_do_not_count_against_the_link() -> None:
    fast = cluster(Link(kind="all-reduce", num_ranks=2, alpha_seconds=0.002, seconds_per_byte=1e-9))
    recipes = (Recipe(), Recipe(extra_compute={1: 0.3}))

    shares = [next(iter(against_cluster(analyse(generate(recipe)), fast).values())).share for recipe in recipes]

    assert shares[0] == pytest.approx(shares[1])


def test_a_cluster_without_the_links_is_refused() -> None:
    analysis = analyse(generate(Recipe(mesh={"data": 4})))
    link = Link(kind="all-reduce", num_ranks=2, alpha_seconds=0.0, seconds_per_byte=1e-9)

    with pytest.raises(ConfigError, match="says nothing of the links between nodes"):
        against_cluster(analysis, cluster(link, devices_per_node=2))


def test_the_command_tells_it(tmp_path: Path) -> None:
    save_trace(generate(Recipe(num_steps=6)), tmp_path / "profile")
    file = tmp_path / "cluster.yaml"
    link = Link(kind="all-reduce", num_ranks=2, alpha_seconds=0.002, seconds_per_byte=1e-9)
    file.write_text(dump_cluster(cluster(link)))

    result = CliRunner().invoke(app, ["profile", "show", str(tmp_path), "--cluster", str(file), "--json"])

    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.output)["collectives_by_cluster"]
    assert entry["share"] == pytest.approx(0.6)
    assert "60 %" in (tmp_path / "profile" / "profile.html").read_text("utf-8")
