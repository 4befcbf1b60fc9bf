"""``convmesh profile``: where the time of a run goes, rank by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from convmesh.cli.check import RanksOption
from convmesh.cli.outputs import refuse_existing, refuse_unwritable
from convmesh.cli.report import LanguageOption as Language
from convmesh.cli.report import LinksOption, RunLanguageOption, read_cluster, wide_console
from convmesh.cli.train import ConfigArgument, EngineOption, MeshOption, PlanOption, SetOption

if TYPE_CHECKING:
    from convmesh.planner.cluster import Cluster
    from convmesh.profiling.analysis import Analysis


class _ProfileGroup(TyperGroup):
    """Takes anything that is no command for a run file: ``convmesh profile run.yaml`` profiles it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else ["run", *args])


app = typer.Typer(
    cls=_ProfileGroup,
    help="Show where the time of a run goes: compute, communication, waiting, rank by rank.",
    no_args_is_help=True,
)

AdviceOption = Annotated[
    Path | None, typer.Option("--advice-config", metavar="FILE", help="Write the run file with the advice applied.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@app.command("run")
def run(  # noqa: PLR0913, PLR0917 - one parameter per option
    config: ConfigArgument,
    ranks: RanksOption = None,
    engine: EngineOption = None,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates to profile.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Updates before them.")] = 5,
    detail: Annotated[
        bool, typer.Option("--detail", help="Ask the engine's own profiler too: every operator; slower.")
    ] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/profile-NAME-TIME].")] = None,
    language: RunLanguageOption = None,
    cluster: LinksOption = None,
    advice_config: AdviceOption = None,
    json_: Json = False,
) -> None:
    """Run a few updates and show where their time goes; the word 'run' may be left out."""
    from convmesh.api_profile import profile
    from convmesh.config.schema import ProfileConfig
    from convmesh.report.html import language_of
    from convmesh.report.profile_text import texts
    from convmesh.training.profiling import FOLDER

    texts(language or "en")
    _check_output(advice_config)
    links = read_cluster(cluster)
    found = profile(
        config,
        window=ProfileConfig(start=warmup, steps=steps, detail=detail),
        ranks=ranks,
        mesh=mesh,
        engine=engine,
        plan=plan,
        overrides=tuple(set_ or ()),
        run_dir=run_dir,
        on_start=lambda folder: typer.echo(f"Run folder: {folder.root}", err=True),
    )
    language = language or language_of(found.run_dir)
    _write(
        found.analysis, found.run_dir / FOLDER, language=language, cluster=links, as_json=json_, output=advice_config
    )


@app.command("import")
def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Kineto traces of PyTorch (.json, .json.gz), folders of them, or profile folders of MindSpore and of "
            "Ascend NPUs, one or more ranks each.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the profile and its report go.")],
    language: Language = "en",
    cluster: LinksOption = None,
    json_: Json = False,
) -> None:
    """Read profiles that PyTorch or MindSpore have written, and report on them."""
    from convmesh.profiling.analysis import analyse
    from convmesh.profiling.importing.find import import_profiles
    from convmesh.profiling.store import save_trace
    from convmesh.report.profile_text import texts

    texts(language)
    links = read_cluster(cluster)

    def say(path: Path) -> None:
        typer.echo(f"Reading {path}", err=True)

    trace = import_profiles(paths, on_file=say)
    save_trace(trace, output)
    _write(analyse(trace), output, language=language, cluster=links, as_json=json_)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A folder with a profile.json, or a run folder that has one.")],
    language: RunLanguageOption = None,
    cluster: LinksOption = None,
    advice_config: AdviceOption = None,
    json_: Json = False,
) -> None:
    """Report again on a profile that was captured or imported."""
    from convmesh.profiling.analysis import analyse
    from convmesh.profiling.store import load_trace
    from convmesh.report.html import find_profile, language_of
    from convmesh.report.profile_text import texts

    found = find_profile(folder) or folder
    language = language or language_of(found.parent)
    texts(language)
    _check_output(advice_config)
    links = read_cluster(cluster)
    _write(analyse(load_trace(found)), found, language=language, cluster=links, as_json=json_, output=advice_config)


def _check_output(path: Path | None) -> None:
    if path is not None:
        refuse_unwritable(path, what="the run file", option="--advice-config")
        refuse_existing(path, option="--advice-config")


def _write(
    analysis: Analysis,
    folder: Path,
    *,
    language: str,
    cluster: Cluster | None,
    as_json: bool,
    output: Path | None = None,
) -> None:
    from convmesh.report.achieved import achieved_json, against_cluster
    from convmesh.report.advice_view import print_advice
    from convmesh.report.profile_page import write_profile_page
    from convmesh.report.profile_terminal import print_profile
    from convmesh.training.advice import advise

    advising = advise(analysis, folder, cluster=cluster)
    page = write_profile_page(analysis, folder, language=language, cluster=cluster, advised=advising.advised)
    if as_json:
        content = {**analysis.summary(), "advice": advising.advised.as_dict()}
        if cluster is not None:
            content["collectives_by_cluster"] = achieved_json(against_cluster(analysis, cluster))
        typer.echo(json.dumps(content, indent=2))
    else:
        console = wide_console()
        print_profile(analysis, console, language=language, cluster=cluster)
        print_advice(advising.advised, console, language=language, folder=str(folder))
        typer.echo(f"Report: {page}")
    if output is not None:
        for path in advising.write(output):
            typer.echo(f"Written to {path}", err=True)
