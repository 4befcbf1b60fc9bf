"""From the data section of a run file to training and evaluation sets.

Legend: H rows, W columns, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from convmesh.config.schema import DataConfig
from convmesh.data.batching import spread_positions
from convmesh.data.channels import regroup_scale, regrouped_shape, regrouping_of
from convmesh.data.files import cache_root
from convmesh.data.prepared import MANIFEST, open_prepared
from convmesh.data.sources import cifar10, image_folder
from convmesh.data.sources.base import ArraySource, Source
from convmesh.data.sources.idx import idx_sources
from convmesh.engines.contract import PixelScale
from convmesh.errors import ConfigError, ConvMeshError, DataError, MistakeList, raise_all
from convmesh.geometry.regrouping import ChannelRegrouping

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DataSets:
    """The data of a run.

    Args:
        train: Training samples.
        eval: Evaluation samples.
        class_names: Names of the classes.
        num_channels: Channels of the images.
        image_shape_HWC: Shape of the images, before their channels are regrouped.
        pixel_scale: How pixels become the network's input, per channel that the network sees.
        regrouping: How channels are regrouped, or None.
    """

    train: Source
    eval: Source
    class_names: tuple[str, ...]
    num_channels: int
    image_shape_HWC: tuple[int, int, int]
    pixel_scale: PixelScale
    regrouping: ChannelRegrouping | None = None

    @property
    def network_shape_HWC(self) -> tuple[int, int, int]:  # noqa: N802 - carries its shape
        """Shape of the images that the network sees."""
        return regrouped_shape(self.regrouping, self.image_shape_HWC)


def open_data(config: DataConfig) -> DataSets:
    """Opens the data of a run; reads indexes and labels, images only when they are needed.

    Args:
        config: The data section of the run file.

    Returns:
        The data sets.

    Raises:
        DataError: If data is missing, half fetched or damaged.
        ConfigError: If settings don't fit the data; several are listed together as a ``MistakeList``.
    """
    train, evaluation = _open_sources(config)
    errors = [*_wrong_scale(config, train), *_wrong_size(config, train)]
    subsets = []
    for source, wanted, setting in ((train, config.num_train, "num_train"), (evaluation, config.num_eval, "num_eval")):
        if wanted is not None and wanted > source.num_samples:
            errors.append(
                ConfigError(
                    f"data.{setting} asks for more samples than {source.name} holds",
                    got=wanted,
                    expected=f"at most {source.num_samples}",
                    fix=f"Lower or remove 'data.{setting}'",
                )
            )
            continue
        subsets.append(source if wanted is None else source.subset(even_subset(source.labels_N, num_taken=wanted)))
    shape_HWC, regrouping = _image_shape(config, train), None
    try:
        regrouping = regrouping_of(config.channels, image_shape_HWC=shape_HWC)
    except MistakeList as found:
        errors += found.errors
    except ConfigError as found:
        errors.append(found)
    raise_all(errors)
    scale = _pixel_scale(config, train)
    return DataSets(
        train=subsets[0],
        eval=subsets[1],
        class_names=train.class_names,
        num_channels=train.num_channels,
        image_shape_HWC=shape_HWC,
        pixel_scale=scale if regrouping is None else regroup_scale(scale, regrouping),
        regrouping=regrouping,
    )


def even_subset(labels_N: npt.NDArray[np.int32], *, num_taken: int) -> npt.NDArray[np.int64]:
    """Chooses samples evenly over the classes: each gives floor or ceil of its share, spread over its samples.

    Args:
        labels_N: Class of every sample.
        num_taken: How many are wanted.

    Returns:
        Rising sample ids; they depend on the arguments alone.
    """
    by_class = np.argsort(labels_N, kind="stable")
    offset = len(labels_N) // (2 * num_taken)
    return np.sort(by_class[spread_positions(len(labels_N), num_taken=num_taken, offset=offset)])


def _open_sources(config: DataConfig) -> tuple[Source, Source]:
    if config.source in ("image_folder", "idx") and config.path is None:
        raise ConfigError(f"the source {config.source} needs the folder of the data", fix="Set 'data.path'")
    folder = Path(config.path).expanduser() if config.path else cache_root() / config.source
    if config.path and not folder.is_dir():
        raise DataError(f"there is no folder {folder}", fix="Set 'data.path' to the folder of the data")
    if config.source == "image_folder":
        return image_folder.folder_sources(folder)
    if config.source == "idx":
        return idx_sources(folder)
    return _prepared_sources(config.source, folder)


def _prepared_sources(name: str, folder: Path) -> tuple[Source, Source]:
    if name == "cifar10" and not (folder / MANIFEST).exists():
        found = cifar10.find_layout(folder)
        if found is not None:
            place, layout = found
            train, test = (cifar10.folder_source(place, layout=layout, split=split) for split in ("train", "test"))
            return train, test
    prepared = open_prepared(folder, fetch=f"convmesh data fetch {name}")
    return prepared.source("train"), prepared.source("test")


def _wrong_size(config: DataConfig, source: Source) -> list[ConvMeshError]:
    if not isinstance(source, ArraySource):
        if config.image_size is None:
            return [ConfigError("images of a folder differ in size", fix="Set 'data.image_size', for example 224")]
        return []
    rows, columns, channels = source.shape_HWC
    if config.image_size is None and config.augment.random_resized_crop and rows != columns:
        return [
            ConfigError(
                f"a random resized crop makes square images, and those of {source.name} are not square",
                got=f"{rows} x {columns}",
                fix="Set 'data.image_size'",
            )
        ]
    resized = config.augment.random_resized_crop or (
        config.image_size is not None and (rows, columns) != (config.image_size, config.image_size)
    )
    if channels not in (1, 3) and resized:
        return [
            ConfigError(
                "only grey and colour images can be resized",
                got=f"{channels} channels in {source.name}",
                fix="Remove 'data.image_size' and 'data.augment.random_resized_crop'",
            )
        ]
    return []


def _wrong_scale(config: DataConfig, source: Source) -> list[ConvMeshError]:
    if config.mean is None or config.std is None:
        if (config.mean is None) != (config.std is None):
            return [ConfigError("data.mean and data.std belong together", fix="Give both, or none of them")]
        return []
    errors: list[ConvMeshError] = []
    for name, values in (("mean", config.mean), ("std", config.std)):
        if len(values) != source.num_channels:
            errors.append(
                ConfigError(
                    f"data.{name} has not one number per channel of {source.name}",
                    got=f"{len(values)} numbers",
                    expected=f"{source.num_channels}",
                )
            )
    largest = max((*config.mean, *config.std), default=0.0)
    if config.pixel_range == "0-255" and largest <= 1:
        errors.append(
            ConfigError(
                "data.mean and data.std are those of pixels from 0 to 1, but data.pixel_range is 0-255",
                got=f"mean {list(config.mean)}, std {list(config.std)}",
                fix="Set 'data.pixel_range: 0-1', or multiply both by 255",
            )
        )
    if config.pixel_range == "0-1" and largest > 1:
        errors.append(
            ConfigError(
                "data.mean and data.std are those of pixels from 0 to 255, but data.pixel_range is 0-1",
                got=f"mean {list(config.mean)}, std {list(config.std)}",
                fix="Set 'data.pixel_range: 0-255', or divide both by 255",
            )
        )
    return errors


def _image_shape(config: DataConfig, source: Source) -> tuple[int, int, int]:
    if isinstance(source, ArraySource) and config.image_size is None:
        return source.shape_HWC
    side = config.image_size or 0
    return side, side, source.num_channels


def _pixel_scale(config: DataConfig, source: Source) -> PixelScale:
    """``x = (pixel / range - mean) / std``, as one factor and one offset per channel."""
    if config.mean is not None and config.std is not None:
        top = 255.0 if config.pixel_range == "0-1" else 1.0
        mean, std = config.mean, config.std
    else:
        top = 255.0
        mean, std = _known_statistics(config, source)
    return PixelScale(
        factor_C=tuple(1 / (top * spread) for spread in std),
        offset_C=tuple(-middle / spread for middle, spread in zip(mean, std, strict=True)),
    )


def _known_statistics(config: DataConfig, source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if config.source == "cifar10":
        return cifar10.MEAN, cifar10.STD
    if not isinstance(source, ArraySource):
        return _IMAGENET_MEAN, _IMAGENET_STD
    return measured_statistics(source.images)


def measured_statistics(images_NHWC: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of pixels from 0 to 1.

    Args:
        images_NHWC: uint8 images.

    Returns:
        Means and standard deviations; 1 for a channel that never changes.
    """
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images_NHWC.shape[3]):
        share = np.zeros(256)
        for chunk in np.array_split(images_NHWC, max(1, len(images_NHWC) // 4096)):
            share += np.bincount(chunk[..., channel].ravel(), minlength=256)
        share /= share.sum()
        mean = float(share @ levels)
        means.append(mean)
        stds.append(float(np.sqrt(share @ (levels - mean) ** 2)) or 1.0)
    return tuple(means), tuple(stds)
