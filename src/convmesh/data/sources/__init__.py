"""Sources: where images and labels come from."""

from convmesh.data.sources.base import ArraySource, CorruptImageError, Source

__all__ = ["ArraySource", "CorruptImageError", "Source"]
