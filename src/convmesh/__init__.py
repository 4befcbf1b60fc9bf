"""ConvMesh: hybrid parallel training of convolutional networks on MindSpore and PyTorch."""
