"""``convmesh verify``: shows that a parallel run computes what one device computes."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convmesh.cli.check import JsonOption, RanksOption
from convmesh.cli.train import ConfigArgument, EngineOption, MeshOption, PlanOption, SetOption
from convmesh.units import format_bytes

if TYPE_CHECKING:
    from convmesh.training.compare import Worst
    from convmesh.training.verification import Verification


def verify(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigArgument,
    ranks: RanksOption = None,
    engine: EngineOption = None,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates to train.")] = 3,
    dtype: Annotated[str, typer.Option(metavar="float32|float64", help="Data type of all numbers.")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Train a few updates on many ranks and on one device, and compare every tensor; exit code 1 if they differ."""
    from convmesh import api
    from convmesh.errors import ConfigError

    if dtype not in ("float32", "float64"):
        raise ConfigError("there is no such data type to verify with", got=dtype, expected="float32 or float64")
    found = api.verify(
        config,
        ranks=ranks,
        mesh=mesh,
        engine=engine,
        plan=plan,
        overrides=tuple(set_ or ()),
        steps=steps,
        dtype=dtype,  # type: ignore[arg-type]
    )
    typer.echo(json.dumps(_as_dict(found), indent=2) if as_json else _describe(found))
    if not found.passed:
        raise typer.Exit(1)


def _as_dict(found: Verification) -> dict[str, Any]:
    return {
        "passed": found.passed,
        "inconclusive": found.inconclusive,
        "conditions": dataclasses.asdict(found.conditions) if found.conditions is not None else None,
        "worst": [
            {**dataclasses.asdict(entry), "passed": entry.passed, "verdict": entry.verdict} for entry in found.worst
        ],
        "collectives": [{**dataclasses.asdict(entry), "passed": entry.passed} for entry in found.collectives],
        "memory": dataclasses.asdict(found.memory),
    }


def _describe(found: Verification) -> str:
    lines = [
        *_describe_conditions(found),
        "Largest relative difference of each kind, what is allowed, and what rounding alone changes on one device:",
        *map(_describe_worst, found.worst),
    ]
    lines.append("Collectives of one update on rank 0, counted and told beforehand:")
    for check in found.collectives:
        told = "as told" if check.passed else f"told {check.expected_number} x, {format_bytes(check.expected_bytes)}"
        lines.append(f"  {check.axis:8} {check.number:4} x {check.kind:15} {format_bytes(check.num_bytes):>12}  {told}")
    return "\n".join([*lines, *_describe_memory(found), _conclude(found)])


def _describe_conditions(found: Verification) -> list[str]:
    if found.conditions is None or found.conditions.norm_shift is None:
        return []
    return [
        f"Exercised with the learning rate {found.conditions.learning_rate:g} and norms that shift by "
        f"{found.conditions.norm_shift:g}: few activations then lie where rounding turns a gradient on or off."
    ]


def _describe_worst(entry: Worst) -> str:
    unproved = f", {entry.num_inconclusive} inconclusive" if entry.num_inconclusive else ""
    return (
        f"  {entry.kind:10} {entry.difference:9.2e}  allowed {entry.allowed:8.1e}  rounding {entry.rounding:8.1e}  "
        f"{entry.verdict.upper() if not entry.passed else 'ok'}  "
        f"({entry.num_tensors} compared{unproved}; worst: {entry.name})"
    )


def _describe_memory(found: Verification) -> list[str]:
    memory = found.memory
    kept, alone = [size for size in memory.saved_bytes if size is not None], memory.one_device_saved_bytes
    return [
        "Memory of the fullest rank, and of one device with the same micro-batch:",
        f"  kept for the backward {format_bytes(max(kept))} of {format_bytes(alone)}"
        if kept and alone is not None
        else "  kept for the backward: not told by this engine",
        f"  peak of the process   {format_bytes(max(memory.peak_bytes))} of "
        f"{format_bytes(memory.one_device_peak_bytes)}",
    ]


def _conclude(found: Verification) -> str:
    if found.passed:
        return "The parallel run equals one device."
    if not found.inconclusive:
        return "The parallel run DIFFERS from one device."
    if found.dtype == "float64":
        way_out = "use fewer --steps, or a smaller learning rate"
    elif found.engine == "torch":
        way_out = "use --dtype float64"
    else:
        way_out = "use smaller images or fewer layers, or verify the same network with --engine torch --dtype float64"
    return f"INCONCLUSIVE: rounding alone changes that much, so equality is not proved; {way_out}."
