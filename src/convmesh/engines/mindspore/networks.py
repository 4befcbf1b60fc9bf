"""Building a network by name or by the user's factory, and giving it weights."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from convmesh.config.schema import ModelConfig
from convmesh.engines.contract import Arrays
from convmesh.engines.mindspore.state import import_network
from convmesh.errors import ModelError, brief
from convmesh.models.factory import call_factory
from convmesh.models.mindspore import build


def build_network(model: ModelConfig, *, num_classes: int, num_channels: int, seed: int) -> nn.Cell:
    """Builds a network; see `convmesh.engines.contract.Engine.build_network`.

    MindSpore's global seed is set for a user's factory, which may draw its weights from it.

    Args:
        model: Name or factory, arguments, and a file of weights or none.
        num_classes: Classes of the data.
        num_channels: Channels of the images.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        ModelError: If the factory fails or weights don't fit.
    """
    ms.set_seed(seed)
    if model.name is not None:
        args = {"num_classes": num_classes, "num_channels": num_channels, **model.args}
        network = build(model.name, seed=seed, **args)
    else:
        network = call_factory(model.factory or "", model.args, base=nn.Cell, engine="mindspore")
    # Parameters that are drawn lazily get their values here, while the seed is fresh.
    network.init_parameters_data()
    if model.weights is not None:
        import_network(
            network, read_weights(Path(model.weights)), error=ModelError, source=model.weights, compiled=False
        )
    return network


def read_weights(path: Path) -> Arrays:
    """Reads a .safetensors file.

    Args:
        path: The file; bfloat16 tensors become float32.

    Returns:
        Arrays by name.

    Raises:
        ModelError: If the file is missing, damaged or of another kind.
    """
    if not path.is_file():
        raise ModelError(f"there is no file of weights {path}", fix="Set 'model.weights' to an existing file")
    if path.suffix != ".safetensors":
        raise ModelError(
            "the MindSpore engine reads weights from .safetensors files only",
            got=path.name,
            fix="Convert it where PyTorch is installed: safetensors.torch.save_file("
            f"torch.load('{path.name}', weights_only=True), '{path.stem}.safetensors')",
        )
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise ModelError(f"the weights {path} can't be read", got=brief(error)) from None


def output_width(network: nn.Cell, *, image_shape_HWC: tuple[int, int, int]) -> int:
    """Runs one blank image; see `convmesh.engines.contract.Engine.output_width`.

    Raises:
        ModelError: If the network can't take such an image, or its output is not (N, classes).
    """
    height, width, num_channels = image_shape_HWC
    x_NCHW = Tensor(np.zeros((1, num_channels, height, width), np.float32))
    was_training = network.training
    network.set_train(False)
    try:
        output = network(x_NCHW)
        shape = tuple(output.shape) if isinstance(output, Tensor) else None
    except Exception as error:
        raise ModelError(
            f"the network can't take a {height}x{width} image of {num_channels} channels", got=brief(error)
        ) from error
    finally:
        network.set_train(was_training)
    if shape is None or len(shape) != 2 or shape[0] != 1:
        got = f"shape {shape}" if shape is not None else type(output).__name__
        raise ModelError("the network's output is not one score per sample and class", got=got, expected="(1, classes)")
    return int(shape[1])
