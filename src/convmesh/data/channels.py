"""Regrouped channels of the images that the network sees; see `convmesh.geometry.regrouping`.

Legend: N samples, H rows, W columns, C channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.config.schema import ChannelsConfig
from convmesh.engines.contract import PixelScale
from convmesh.errors import ConfigError, MistakeList
from convmesh.geometry.regrouping import ChannelRegrouping


def regrouping_of(config: ChannelsConfig, *, image_shape_HWC: tuple[int, int, int]) -> ChannelRegrouping | None:
    """The regrouping that a run file asks for.

    Args:
        config: The section ``data.channels``.
        image_shape_HWC: Shape of the images before.

    Returns:
        The regrouping; None if it changes nothing.

    Raises:
        ConfigError: If it does not fit the images; several mistakes are listed together as a ``MistakeList``.
    """
    try:
        regrouping = ChannelRegrouping.of(
            image_shape_HWC[2],
            space_to_depth=config.space_to_depth,
            pad=config.pad,
            pad_to=config.pad_to,
            order=config.order,
        )
        regrouping.sizes(image_shape_HWC[:2])
    except MistakeList as found:
        raise MistakeList([_named(error) for error in found.errors]) from None
    except ConfigError as error:
        raise _named(error) from None
    return None if regrouping.is_identity else regrouping


def regrouped_shape(regrouping: ChannelRegrouping | None, shape_HWC: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape of images after regrouping."""
    if regrouping is None:
        return shape_HWC
    rows, columns = regrouping.sizes(shape_HWC[:2])
    return rows, columns, regrouping.num_regrouped


def regroup_images(images_NHWC: npt.NDArray[np.uint8], regrouping: ChannelRegrouping) -> npt.NDArray[np.uint8]:
    """Regroups images as sources keep them.

    Args:
        images_NHWC: Pixels, channels last.
        regrouping: Of their channels.

    Returns:
        (N, rows, columns, regrouped channels) of blocks.
    """
    return np.ascontiguousarray(np.moveaxis(regrouping.images(np.moveaxis(images_NHWC, -1, 1)), 1, -1))


def regroup_scale(scale: PixelScale, regrouping: ChannelRegrouping) -> PixelScale:
    """The scale of regrouped pixels: each as before, and zero in zero channels."""
    origins = regrouping.origins
    return PixelScale(
        factor_C=tuple(0.0 if origin is None else scale.factor_C[origin.channel] for origin in origins),
        offset_C=tuple(0.0 if origin is None else scale.offset_C[origin.channel] for origin in origins),
    )


def _named(error: Any) -> ConfigError:
    return ConfigError(f"data.channels: {error.what}", got=error.got, expected=error.expected, fix=error.fix)
