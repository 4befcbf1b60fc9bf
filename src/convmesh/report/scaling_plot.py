"""Predicted scaling as a PNG file: images per second over devices, strong and weak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convmesh.errors import DataError
from convmesh.planner.scaling import ScalingPoint


def save_scaling(points: Sequence[ScalingPoint], path: Path | str, *, title: str) -> Path:
    """Draws both kinds of scaling beside each other, with the ideal line through the first point.

    Args:
        points: At least one point of each kind.
        path: The PNG file; its folder is made if missing.
        title: What stands above.

    Returns:
        The path.

    Raises:
        DataError: If there is nothing to draw, or the file can't be written.
    """
    if not any(point.seconds for point in points):
        raise DataError("there is no scaling to draw: nothing fits", fix="Use devices with more memory")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    figure.suptitle(title)
    for axes, kind in zip(figure.subplots(1, 2), ("strong", "weak"), strict=True):
        own = [point for point in points if point.kind == kind]
        _draw(axes, own)
        batch = f"a global batch of {own[0].global_batch:,}" if kind == "strong" else (
            f"{own[0].global_batch // own[0].num_ranks:,} samples per device"
        )  # fmt: skip
        axes.set_title(f"{kind.capitalize()} scaling: {batch}")
    where = Path(path)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(where, format="png")
    except OSError as error:
        raise DataError(f"the picture {where} can't be written", got=error.strerror or str(error)) from None
    return where


def _draw(axes: object, points: Sequence[ScalingPoint]) -> None:
    best = [(point.num_ranks, point.samples_per_second) for point in points if point.samples_per_second]
    plain = [(point.num_ranks, point.plain_samples_per_second) for point in points if point.plain_samples_per_second]
    plot = axes.plot  # type: ignore[attr-defined]
    if best:
        first, rate = best[0]
        ideal = [(number, rate * number / first) for number, _ in best]
        plot(*zip(*ideal, strict=True), color="0.7", linestyle="--", label="ideal")
        plot(*zip(*best, strict=True), marker="o", label="best plan")
    if plain:
        plot(*zip(*plain, strict=True), marker="x", linestyle=":", label="plain data parallel")
    axes.set_xscale("log", base=2)  # type: ignore[attr-defined]
    axes.set_yscale("log")  # type: ignore[attr-defined]
    axes.set_xlabel("devices")  # type: ignore[attr-defined]
    axes.set_ylabel("images/s")  # type: ignore[attr-defined]
    axes.grid(alpha=0.3)  # type: ignore[attr-defined]
    axes.legend()  # type: ignore[attr-defined]
