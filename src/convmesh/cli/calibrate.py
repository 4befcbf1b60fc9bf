"""``convmesh calibrate``: measures this machine, so that plans can be judged before they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convmesh.cli.outputs import refuse_unwritable
from convmesh.cli.train import EngineOption, SetOption
from convmesh.units import format_bytes

if TYPE_CHECKING:
    from convmesh.planner.cluster import Cluster

MOST_SECONDS = 85.0
"""Time for measuring by default; with the start of the ranks it stays below two minutes."""


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The cluster file to write.")],
    config: Annotated[
        Path | None, typer.Argument(help="A run file: the operators of its network are measured at their very shapes.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that compute at once.")] = 2,
    engine: EngineOption = None,
    set_: SetOption = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time for measuring, beside the start.")] = MOST_SECONDS,
) -> None:
    """Measure what this machine's ranks compute and send per second, and write it as a cluster file."""
    from convmesh.planner.cluster_file import dump_cluster
    from convmesh.training import calibration
    from convmesh.training.run_folder import write_atomically

    # Before anything is measured: a minute of measuring would be lost.
    refuse_unwritable(output, what="the cluster file", option="--output")
    subject = calibration.subject_of(
        config, num_ranks=ranks, engine=engine, overrides=tuple(set_ or ()), seconds=seconds
    )
    cluster = calibration.calibrate(subject)
    write_atomically(output, dump_cluster(cluster))
    typer.echo(_describe(cluster))
    typer.echo(f"Written to {output}; use it with: convmesh plan CONFIG --ranks {ranks} --cluster {output}")


def _describe(cluster: Cluster) -> str:
    device = cluster.device
    lines = [
        f"{cluster.name}: {len(cluster.measured)} operators measured, forward and backward.",
        f"A rank holds {format_bytes(device.fixed_bytes)} beside tensors, and "
        f"{format_bytes(device.bytes_per_operator)} more for each operator.",
        f"An update takes {1e3 * cluster.update_seconds:.1f} ms beside its operators, each of its micro-batches "
        f"{1e3 * cluster.micro_batch_seconds:.1f} ms.",
    ]
    for link in cluster.links.inside:
        way = " in shared memory" if link.way == "shared_memory" else ""
        groups = f", {link.num_groups} groups at once" if link.num_groups > 1 else ""
        rate = f"{1 / link.seconds_per_byte / 1e9:.2f} GB/s" if link.seconds_per_byte else "any size"
        lines.append(
            f"  {link.kind:15} {link.num_ranks} ranks{groups}{way}: {1e3 * link.alpha_seconds:.2f} ms and {rate}, "
            f"spread {link.spread:.0%}"
        )
    if cluster.links.inside:
        lines.append(f"{cluster.overlap:.0%} of the gradient reduction that could hide behind the backward does.")
    if cluster.data_seconds_per_sample is not None:
        lines.append(f"Reading a sample takes {1e3 * cluster.data_seconds_per_sample:.2f} ms.")
    return "\n".join(lines)
