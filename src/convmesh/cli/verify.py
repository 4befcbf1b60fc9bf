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
        "worst": [{**dataclasses.asdict(entry), "passed": entry.passed} for entry in found.worst],
        "collectives": [{**dataclasses.asdict(entry), "passed": entry.passed} for entry in found.collectives],
        "memory": dataclasses.asdict(found.memory),
    }


def _describe(found: Verification) -> str:
    lines = ["Largest relative difference of each kind:"]
    for entry in found.worst:
        verdict = "ok" if entry.passed else "TOO LARGE"
        lines.append(
            f"  {entry.kind:10} {entry.difference:9.2e}  allowed {entry.allowed:8.1e}  {verdict}  "
            f"({entry.num_tensors} compared; worst: {entry.name})"
        )
    if any(entry.is_rounding for entry in found.worst):
        lines.append(
            "Where more is allowed than usual, rounding alone differs so much; --dtype float64 settles doubts."
        )
    lines.append("Collectives of one update on rank 0, counted and told beforehand:")
    for check in found.collectives:
        told = "as told" if check.passed else f"told {check.expected_number} x, {format_bytes(check.expected_bytes)}"
        lines.append(f"  {check.axis:8} {check.number:4} x {check.kind:15} {format_bytes(check.num_bytes):>12}  {told}")
    memory = found.memory
    lines.append("Memory of the fullest rank, and of one device with the same micro-batch:")
    if memory.one_device_saved_bytes:
        kept, alone = format_bytes(max(memory.saved_bytes)), format_bytes(memory.one_device_saved_bytes)
        lines.append(f"  kept for the backward {kept} of {alone}")
    lines += [
        f"  peak of the process   {format_bytes(max(memory.peak_bytes))} of "
        f"{format_bytes(memory.one_device_peak_bytes)}",
        "The parallel run equals one device." if found.passed else "The parallel run DIFFERS from one device.",
    ]
    return "\n".join(lines)
