"""The version of ConvMesh."""

__version__ = "0.1.0"
