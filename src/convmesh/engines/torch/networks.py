"""Building a network by name or by the user's factory, and giving it weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from convmesh.config.schema import ModelConfig
from convmesh.engines.contract import Arrays
from convmesh.engines.torch.state import import_network, to_array
from convmesh.errors import ModelError, brief
from convmesh.models.factory import call_factory
from convmesh.models.torch import build

_WRAPPINGS = ("state_dict", "model", "model_state_dict")


def build_network(
    model: ModelConfig, *, num_classes: int, num_channels: int, seed: int, device: torch.device
) -> nn.Module:
    """Builds a network on a device; see `convmesh.engines.contract.Engine.build_network`.

    PyTorch's generators are seeded for the initial weights and left as they were.

    Args:
        model: Name or factory, arguments, and a file of weights or none.
        num_classes: Classes of the data.
        num_channels: Channels of the images.
        seed: Seed of the initial weights.
        device: Where it is put.

    Returns:
        The network.

    Raises:
        ModelError: If the factory fails or weights don't fit.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        if model.name is not None:
            args = {"num_classes": num_classes, "num_channels": num_channels, **model.args}
            network = build(model.name, **args)
        else:
            network = call_factory(model.factory or "", model.args, base=nn.Module, engine="torch")
    if model.weights is not None:
        import_network(network, read_weights(Path(model.weights)), error=ModelError, source=model.weights)
    return network.to(device)


def read_weights(path: Path) -> Arrays:
    """Reads a file of weights; executes no pickled code.

    Args:
        path: A .safetensors file, or a .pth or .pt read by PyTorch's weights-only loader; a state dict within one of
            the usual wrappings is found.

    Returns:
        Arrays by name.

    Raises:
        ModelError: If the file is missing, damaged, or holds something else than named tensors.
    """
    if not path.is_file():
        raise ModelError(f"there is no file of weights {path}", fix="Set 'model.weights' to an existing file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {name: to_array(tensor) for name, tensor in load_file(path).items()}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(f"the weights {path} can't be read", got=brief(error)) from None
    for wrapping in _WRAPPINGS:
        if isinstance(content, dict) and isinstance(content.get(wrapping), dict):
            content = content[wrapping]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(f"the weights {path} are not a state dict", got=type(content).__name__)
    return {name: to_array(tensor) for name, tensor in content.items()}


def output_width(network: nn.Module, *, image_shape_HWC: tuple[int, int, int]) -> int:
    """Runs one blank image; see `convmesh.engines.contract.Engine.output_width`.

    Raises:
        ModelError: If the network can't take such an image, or its output is not (N, classes).
    """
    height, width, num_channels = image_shape_HWC
    like = next(iter(network.parameters()), torch.zeros(()))
    x_NCHW = torch.zeros(1, num_channels, height, width, device=like.device, dtype=like.dtype)
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            output = network(x_NCHW)
    except Exception as error:
        raise ModelError(f"the network can't take a {height}x{width} image of {num_channels} channels",
                         got=brief(error)) from error  # fmt: skip
    finally:
        network.train(was_training)
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[0] != 1:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError("the network's output is not one score per sample and class", got=got, expected="(1, classes)")
    return int(output.shape[1])
