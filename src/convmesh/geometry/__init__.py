"""Pure integers: which part of a tensor each rank of an axis owns, and how channels are regrouped."""

from convmesh.geometry.channel_partition import ChannelPartition
from convmesh.geometry.regrouping import ChannelRegrouping

__all__ = ["ChannelPartition", "ChannelRegrouping"]
