"""Pure integers: which part of a tensor each rank of an axis owns."""

from convmesh.geometry.channel_partition import ChannelPartition

__all__ = ["ChannelPartition"]
