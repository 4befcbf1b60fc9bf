"""Reference networks, one package per engine; parameter names as in torchvision."""
