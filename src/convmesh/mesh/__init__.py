"""The device mesh: named axes, ranks and coordinates."""

from convmesh.mesh.mesh import AXES, Mesh, parse_mesh

__all__ = ["AXES", "Mesh", "parse_mesh"]
