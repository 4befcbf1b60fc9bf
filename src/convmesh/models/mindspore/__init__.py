"""Reference networks as ``nn.Cell``; the twins of `convmesh.models.torch`, name for name."""

from convmesh.models.mindspore.networks import NETWORKS, build

__all__ = ["NETWORKS", "build"]
