"""Mesh: ranks, coordinates and groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convmesh.errors import ConfigError
from convmesh.mesh import Mesh, parse_mesh

names = st.sampled_from(["stage", "data", "channel", "height", "width", "model"])
meshes = st.dictionaries(names, st.integers(1, 4), min_size=1, max_size=4).map(Mesh)


@given(meshes)
def test_rank_and_coordinate_are_inverse(mesh):
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.num_ranks)] == list(range(mesh.num_ranks))


@given(meshes, names)
def test_groups_partition_the_ranks_and_differ_on_their_axis_alone(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
    for group in groups:
        assert [mesh.coordinate(rank).get(axis, 0) for rank in group] == list(range(mesh.size(axis)))
        others = [{name: at for name, at in mesh.coordinate(rank).items() if name != axis} for rank in group]
        assert all(other == others[0] for other in others)


@given(meshes)
def test_text_reads_back(mesh):
    assert parse_mesh(str(mesh)) == mesh


def test_stage_and_data_are_slowest_whatever_the_order():
    mesh = Mesh({"channel": 2, "data": 2, "stage": 2})
    assert list(mesh.sizes) == ["stage", "data", "channel"]
    assert mesh.coordinate(1) == {"stage": 0, "data": 0, "channel": 1}
    assert mesh.groups("channel") == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("text", ["data", "data=x", "data=2,data=3", "data=0", "Data=2", "=2"])
def test_a_wrong_mesh_is_a_sentence(text):
    with pytest.raises(ConfigError):
        parse_mesh(text)


def test_no_such_rank():
    with pytest.raises(ConfigError, match="0 to 3"):
        Mesh({"data": 4}).coordinate(4)
