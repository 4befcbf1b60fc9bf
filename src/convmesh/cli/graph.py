"""``convmesh graph``: a network as its operators, with shapes, parameters, FLOPs and activations."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convmesh.cli.report import wide_console
from convmesh.errors import ConfigError
from convmesh.units import format_bytes

if TYPE_CHECKING:
    from convmesh.config import RunConfig
    from convmesh.graph import Graph, Listing, Row

_IMAGE_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


def graph(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: Annotated[Path, typer.Argument(help="A run file, as in the folder examples/.")],
    engine: Annotated[str | None, typer.Option(metavar="mindspore|torch", help="The framework that computes.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of the batch that shapes and costs are for.")] = 1,
    image_shape: Annotated[
        str | None, typer.Option(metavar="HxWxC", help="Shape of the images, like 224x224x3 [default: the data's].")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes [default: the data's].")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Sum up operators below this depth of modules, like 1 or 2.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="List the blocks that strategy.recompute can name, and what each saves.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the graph as JSON.")] = False,
) -> None:
    """Show the operators of a network: shapes, parameters, multiply-adds, activations kept for the backward."""
    from convmesh.graph import list_graph
    from convmesh.training.run_graph import read_graph

    run = _load(config, engine=engine, overrides=tuple(set_ or ()))
    found = read_graph(run, batch=batch, image_shape_HWC=parse_image_shape(image_shape), num_classes=classes)
    listing = list_graph(found, depth=depth)
    if blocks:
        _print_blocks(found, as_json=json_)
    elif json_:
        typer.echo(json.dumps({**json.loads(found.to_json()), "totals": _totals(listing.total)}))
    else:
        _print_table(listing)


def parse_image_shape(text: str | None) -> tuple[int, int, int] | None:
    """Reads a shape as written on the command line.

    Args:
        text: For example ``"224x224x3"``, or None.

    Returns:
        Rows, columns, channels; None for None.

    Raises:
        ConfigError: If the text is not of this form.
    """
    if text is None:
        return None
    match = _IMAGE_SHAPE.fullmatch(text.strip().lower())
    if match is None or 0 in map(int, match.groups()):
        raise ConfigError("the shape of the images is not written as HxWxC", got=repr(text), expected="like 224x224x3")
    height, width, num_channels = map(int, match.groups())
    return height, width, num_channels


def _load(path: Path, *, engine: str | None, overrides: Sequence[str]) -> RunConfig:
    from convmesh.config import load_config

    chosen = [*overrides, *([f"engine={engine}"] if engine else [])]
    return load_config(path, overrides=tuple(chosen))


def _totals(total: Row) -> dict[str, int]:
    return {
        "num_parameters": total.num_parameters,
        "multiply_adds": total.cost.multiply_adds,
        "flops_forward": total.cost.flops_forward,
        "flops_backward": total.cost.flops_backward,
        "saved_bytes": total.saved_bytes,
    }


def _print_table(listing: Listing) -> None:
    from rich.table import Table

    table = Table("operator", "kind", "output", "parameters", "multiply-adds", "saved for backward")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in listing.rows:
        table.add_row(row.name, row.kind, _by(row.shape), *_numbers(row))
    table.add_section()
    table.add_row("total", listing.total.kind, _by(listing.total.shape), *_numbers(listing.total), style="bold")
    # Names of operators are long: a file or pipe has room for them where a narrow terminal has not.
    wide_console(140).print(table)
    cost = listing.total.cost
    typer.echo(
        f"{listing.total.num_parameters:,} parameters. Per batch {_count(cost.multiply_adds)} multiply-adds of "
        f"convolutions and dense layers; {_count(cost.flops_forward)} FLOPs forward and "
        f"{_count(cost.flops_backward)} backward of all operators.\n"
        f"{format_bytes(listing.total.saved_bytes)} of activations are kept for the backward; a tensor that several "
        "operators keep counts at the first."
    )


def _print_blocks(graph: Graph, *, as_json: bool) -> None:
    from rich.table import Table

    from convmesh.graph import blocks, kept_with, recomputation_cost, total_cost

    found = blocks(graph)
    before, after = kept_with(graph, ()), kept_with(graph, found)
    rows: list[dict[str, Any]] = [
        {
            "name": block.name,
            "num_operators": len(block.nodes),
            "kept_bytes": sum(before.kept[name] for name in block.nodes),
            "kept_bytes_recomputed": sum(after.kept[name] for name in block.nodes),
            "again_bytes": sum(after.again[name] for name in block.nodes),
            "flops_again": recomputation_cost(graph, (block,)).flops_forward,
        }
        for block in found
    ]
    if as_json:
        typer.echo(json.dumps({"blocks": rows, "kept_bytes": [before.kept_bytes, after.kept_bytes]}))
        return
    table = Table("block", "operators", "keeps", "recomputed it keeps", "and holds once", "FLOPs again")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        sizes = (format_bytes(row[name]) for name in ("kept_bytes", "kept_bytes_recomputed", "again_bytes"))
        table.add_row(row["name"], str(row["num_operators"]), *sizes, _count(row["flops_again"]))
    wide_console(140).print(table)
    more = recomputation_cost(graph, found).flops_forward / max(1, total_cost(graph).flops_forward)
    typer.echo(
        f"Kept for the backward: {format_bytes(before.kept_bytes)}; with all blocks recomputed "
        f"{format_bytes(after.kept_bytes)}, and once more what the largest holds while its own backward runs.\n"
        f"That computes {100 * more:.0f} % of the forward once more."
    )


def _numbers(row: Row) -> tuple[str, str, str]:
    return (
        f"{row.num_parameters:,}" if row.num_parameters else "",
        _count(row.cost.multiply_adds) if row.cost.multiply_adds else "",
        format_bytes(row.saved_bytes) if row.saved_bytes else "",
    )


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _count(number: int) -> str:
    for factor, unit in ((10**12, " T"), (10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= factor:
            return f"{number / factor:.2f}{unit}"
    return str(number)
