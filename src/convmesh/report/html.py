"""The report of a run: one HTML file that needs nothing else, on a phone, on paper and without a network."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convmesh.config import load_config
from convmesh.errors import ConvMeshError
from convmesh.planner.cluster import Cluster
from convmesh.profiling.advice import Advised
from convmesh.profiling.analysis import Analysis, analyse
from convmesh.profiling.store import INDEX_NAME, load_trace
from convmesh.report import facts, figures
from convmesh.report.advice_view import advice_context
from convmesh.report.foretold import PlanSection, plan_section
from convmesh.report.page import render_page, write_page
from convmesh.report.profile_page import profile_context, write_trace
from convmesh.report.profile_text import texts
from convmesh.report.run_folder import RunData, read_run
from convmesh.training.run_folder import RunFolder

REPORT_NAME = "report.html"
_PROFILE = "profile"
_MAX_ROWS = 200


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a report is made from.

    Args:
        run: What the run folder tells.
        analysis: What its profile says; None without one.
        profile_dir: The folder of the profile.
        problem: Why a profile that is there can't be shown; empty if it can.
    """

    run: RunData
    analysis: Analysis | None = None
    profile_dir: Path | None = None
    problem: str = ""
    _plans: dict[tuple[str, str | None], PlanSection] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_profile(cls, folder: Path) -> Report:
        """Of a profile without a run.

        Args:
            folder: The folder of the profile, or one that holds it.

        Returns:
            An empty run, and what the profile says.

        Raises:
            ProfileError: If it can't be read.
        """
        found = find_profile(folder) or folder
        return cls(run=RunData(run_dir=folder), analysis=analyse(load_trace(found)), profile_dir=found)

    @property
    def has_own_profile(self) -> bool:
        """Whether the profile is the one in the run folder."""
        return self.analysis is not None and self.profile_dir == find_profile(self.run.run_dir)

    def why_no_profile(self, words: facts.Words) -> str:
        """Why there is no ``analysis``: a sentence in the words of the report."""
        return words["broken_profile"].format(reason=self.problem) if self.problem else words["no_profile"]

    def plan(self, language: str, cluster: Cluster | None = None) -> PlanSection:
        """The plan, and its predictions, or those from a cluster file, against what was measured."""
        key = language, None if cluster is None else cluster.name
        if key not in self._plans:  # A network of one's own is read anew for each prediction.
            words = texts(language, "report")
            self._plans[key] = plan_section(self.run, self.analysis, words, cluster=cluster)
        return self._plans[key]


def read_report(run_dir: Path, *, profile_dir: Path | None = None) -> Report:
    """Reads a run folder and the profile in it.

    Args:
        run_dir: The folder of the run.
        profile_dir: A profile of another run, or its run folder; default the one in the run folder, if there is one.

    Returns:
        What they tell. A profile of the run that is damaged is told as a problem.

    Raises:
        RunFolderError: If the folder holds no run.
        ProfileError: If ``profile_dir`` is given and can't be read.
    """
    run = read_run(run_dir)
    if profile_dir is not None:
        found = find_profile(profile_dir) or profile_dir
        return Report(run=run, analysis=analyse(load_trace(found)), profile_dir=found)
    own = find_profile(run_dir)
    if own is None:
        return Report(run=run)
    try:
        return Report(run=run, analysis=analyse(load_trace(own)), profile_dir=own)
    except ConvMeshError as error:
        return Report(run=run, problem=str(error))


def find_profile(folder: Path) -> Path | None:
    """The folder of a profile: the given one, or the one within a run folder; None if there is none."""
    return next((path for path in (folder, folder / _PROFILE) if (path / INDEX_NAME).is_file()), None)


def language_of(run_dir: Path) -> str:
    """The language that a run's own file sets for its pages; English where there is no file that can be read."""
    try:
        return load_config(RunFolder(run_dir).config).report.language
    except ConvMeshError:
        return "en"


def write_report(run_dir: Path, *, language: str | None = None, profile_dir: Path | None = None) -> Path:
    """Writes ``report.html`` into a run folder.

    Works on any state of a run: going, killed, failed, resumed or finished; with or without a profile.

    Args:
        run_dir: The folder of the run.
        language: ``"en"`` or ``"zh"``; default that of the run file.
        profile_dir: A profile of another run, or its run folder; default the one in the run folder, if there is one.

    Returns:
        The path of the report.

    Raises:
        ConfigError: If the language is unknown.
        RunFolderError: If the folder holds no run, or can't be written.
        ProfileError: If ``profile_dir`` is given and can't be read.
    """
    report = read_report(run_dir, profile_dir=profile_dir)
    return write_report_of(report, language=language or language_of(run_dir))


def write_report_of(
    report: Report, *, language: str = "en", cluster: Cluster | None = None, advised: Advised | None = None
) -> Path:
    """Writes ``report.html`` from what was read; see ``write_report``.

    Args:
        report: The run and its profile.
        language: ``"en"`` or ``"zh"``.
        cluster: To hold measured collectives against, and to make predictions anew from.
        advised: Advice on the profile.

    Returns:
        The path of the report.
    """
    page = write_page(
        render_report(report, language=language, cluster=cluster, advised=advised), report.run.run_dir / REPORT_NAME
    )
    if report.analysis is not None and report.profile_dir is not None and report.has_own_profile:
        write_trace(report.analysis, report.profile_dir)
    return page


def render_report(
    report: Report, *, language: str = "en", cluster: Cluster | None = None, advised: Advised | None = None
) -> str:
    """The report as HTML.

    Args:
        report: The run and its profile.
        language: ``"en"`` or ``"zh"``.
        cluster: To hold measured collectives against, and to make predictions anew from.
        advised: Advice on the profile.

    Returns:
        The page. All text that comes from the run is escaped.
    """
    words = texts(language, "report")
    return render_page(
        "report.html.j2",
        **_context(report.run, words),
        **_profile_context(report, language, cluster),
        plan=report.plan(language, cluster),
        advice=advice_context(advised, language=language, folder=str(report.profile_dir)),
        words=words,
        language=language,
    )


def _profile_context(report: Report, language: str, cluster: Cluster | None) -> dict[str, Any]:
    words = texts(language, "report")
    if report.analysis is None:
        return {"profile": None, "profile_note": report.why_no_profile(words)}
    profile = profile_context(report.analysis, language=language, cluster=cluster)
    note = words["profile_of"].format(about=profile["under"])
    if report.has_own_profile:
        note = f"{note} {words['profile_trace']}"
    else:
        note = f"{note} {words['profile_elsewhere'].format(folder=report.profile_dir)}"
    return {"profile": profile, "profile_words": texts(language), "profile_note": note}


def _context(run: RunData, words: facts.Words) -> dict[str, Any]:
    return {
        "title": facts.title(run, words),
        "status": facts.status(run),
        "started": facts.started(run),
        "run_name": run.run_dir.resolve().name,
        "tiles": facts.headline(run, words),
        "remarks": facts.remarks(run, words),
        "training_charts": figures.training_charts(run, words),
        "rank_charts": figures.rank_charts(run, words),
        "heat_map": figures.class_heat_map(run, words),
        "collectives": facts.collective_rows(run),
        "epochs": facts.epoch_rows(run)[-_MAX_ROWS:],
        "checkpoints": facts.checkpoint_rows(run)[-_MAX_ROWS:],
        "config_text": run.config_text,
        "versions": sorted(run.versions.items()),
        "events": [
            ("warning" if event.get("level") == "warning" else "info", str(event.get("text", "")))
            for event in run.events[-_MAX_ROWS:]
        ],
        "num_left_out": max(0, len(run.events) - _MAX_ROWS),
    }
