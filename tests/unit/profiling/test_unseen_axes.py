"""A profile says of which axis of the mesh it saw no collective."""

from __future__ import annotations

from convmesh.mesh import Mesh
from convmesh.profiling.events import EventBuilder, RankEvents
from convmesh.training.profiling import unseen_axes


def _events(axis: str) -> RankEvents:
    builder = EventBuilder(0)
    builder.add("compute", "forward", start=0, end=1, lane="main")
    builder.add("communication", "sum", start=1, end=2, lane="main", axis=axis)
    return builder.build()


def test_an_axis_whose_collectives_nobody_sees_is_told() -> None:
    (remark,) = unseen_axes(_events("data"), Mesh({"data": 2, "channel": 2}))

    assert "'channel'" in remark


def test_an_axis_of_one_rank_and_collectives_of_unknown_axes_are_not() -> None:
    assert unseen_axes(_events("data"), Mesh({"data": 2, "channel": 1})) == ()
    assert unseen_axes(_events(""), Mesh({"data": 2, "channel": 2})) == ()
