"""ConvMesh: hybrid parallel training of convolutional networks on MindSpore and PyTorch."""

__version__ = "0.1.0"
