"""Reference networks as ``nn.Module``; the twins of `convmesh.models.mindspore`, name for name."""

from convmesh.models.torch.networks import NETWORKS, build

__all__ = ["NETWORKS", "build"]
