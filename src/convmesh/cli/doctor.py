"""``convmesh doctor``: what works on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from convmesh.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from convmesh.report.doctor import DoctorReport
    from convmesh.report.engine_probe import CollectiveState, EngineState


def doctor(
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Start two ranks per engine and time every collective.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show engines, devices and collectives, and whether this machine can run the demo.

    Ends with code 0 if an engine works and nothing installed is broken, else with 1.
    """
    from convmesh.report.doctor import doctor as examine

    report = examine(collectives=collectives)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        print_doctor(report)
    raise typer.Exit(0 if report.is_healthy else 1)


def print_doctor(report: DoctorReport, console: Console | None = None) -> None:
    """Prints a report as tables.

    Args:
        report: What the doctor found.
        console: Where to; the standard output by default.
    """
    from rich.console import Console

    out = console or Console(highlight=False)
    _print_machine(report, out)
    for engine in report.engines:
        if engine.collectives:
            _print_collectives(engine, out)
    for finding in report.findings:
        mark = "[red]problem[/red]" if finding.is_problem else "[yellow]remark[/yellow]"
        out.print(mark, end=": ")
        out.print(finding.text + (f". Fix: {finding.fix}" if finding.fix else "."), markup=False, soft_wrap=True)
    demo = report.demo
    out.print("[green]demo: yes[/green]" if demo.possible else "[red]demo: no[/red]", end=", ")
    out.print(demo.reason + (f". Run: {demo.command}" if demo.command else "."), markup=False, soft_wrap=True)


def _print_machine(report: DoctorReport, out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    machine = report.machine
    rows = [
        ("ConvMesh", f"{report.convmesh_version}, Python {report.python_version}, {report.platform}"),
        ("Cores", str(machine.num_cores)),
        ("Memory", f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} of it free"),
        ("npm", machine.npm or "not found"),
        ("Data", f"{machine.data_root}, {format_bytes(machine.disk_free_bytes)} free"),
    ]
    for state in machine.data_sets:
        rows.append((f"  {state.name}", "ready" if state.ready else "damaged" if state.problem else "not fetched"))
    rows += [(engine.title, _engine_text(engine)) for engine in report.engines]
    for name, text in rows:
        table.add_row(name, Text(text))
    out.print(table)


def _engine_text(engine: EngineState) -> str:
    if not engine.installed:
        return f"not installed ({engine.fix})"
    works = "works" if engine.works else "does not work"
    devices = f", on {', '.join(engine.devices)}" if engine.devices else ""
    return f"{engine.version} with NumPy {engine.numpy_version}, {works}{devices}"


def _print_collectives(engine: EngineState, out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    how = "tried by two ranks" if engine.measured else "as known for CPU; --collectives tries them"
    table = Table(title=f"{engine.title}: collectives, {how}", title_justify="left", title_style="bold", min_width=76)
    table.add_column("collective", no_wrap=True)
    table.add_column("works")
    if engine.measured:
        table.add_column("1 KiB", justify="right")
        table.add_column("4 MiB", justify="right")
    table.add_column("note")
    for state in engine.collectives:
        times = [_time_text(state, "small_seconds"), _time_text(state, "large_seconds")] if engine.measured else []
        table.add_row(state.name, "yes" if state.works else "no", *times, Text(state.note))
    out.print(table)


def _time_text(state: CollectiveState, key: str) -> str:
    seconds = getattr(state, key)
    return f"{1000 * seconds:.2f} ms" if state.works and seconds is not None else ""
