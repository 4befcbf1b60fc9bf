"""How the data of a run falls on its ranks, found out without starting any.

Legend: R ranks on the data axis, C classes, P micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convmesh.config.schema import RunConfig
from convmesh.data.open import open_data
from convmesh.data.reader import batching_of, sampler_of

_CHUNK_CELLS = 2**21


@dataclass(frozen=True)
class DataReport:
    """What each rank of the data axis gets in epoch 0.

    Args:
        class_names: Names of the classes.
        counts_RC: Samples per rank and class.
        costs_R: Expected cost per rank: bytes of files to read, or samples.
        cost_unit: ``"bytes"`` or ``"samples"``.
        num_updates: Updates per epoch.
        num_dropped: Samples that an epoch leaves out.
        num_eval: Evaluation samples, over all ranks.
        largest_deviation: Largest difference, in samples, between what a rank holds of a class and the class's samples
            divided by the number of ranks.
        micro_batch_deviation: The same between what a micro-batch holds of a class and its share.
    """

    class_names: tuple[str, ...]
    counts_RC: npt.NDArray[np.int64]
    costs_R: npt.NDArray[np.float64]
    cost_unit: str
    num_updates: int
    num_dropped: int
    num_eval: int
    largest_deviation: float
    micro_batch_deviation: float

    @property
    def num_ranks(self) -> int:
        """Ranks on the data axis."""
        return len(self.counts_RC)

    @property
    def samples_R(self) -> npt.NDArray[np.int64]:  # noqa: N802 - carries its shape
        """Samples per rank."""
        samples: npt.NDArray[np.int64] = self.counts_RC.sum(axis=1)
        return samples

    @property
    def deviations_R(self) -> npt.NDArray[np.float64]:  # noqa: N802 - carries its shape
        """Largest deviation of each rank, over the classes."""
        deviations: npt.NDArray[np.float64] = np.abs(self.counts_RC - self.counts_RC.mean(axis=0)).max(axis=1)
        return deviations

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {
            "num_ranks": self.num_ranks,
            "num_updates": self.num_updates,
            "num_dropped": self.num_dropped,
            "num_eval": self.num_eval,
            "class_names": list(self.class_names),
            "counts": self.counts_RC.tolist(),
            "samples": self.samples_R.tolist(),
            "costs": self.costs_R.tolist(),
            "cost_unit": self.cost_unit,
            "largest_deviation": self.largest_deviation,
            "micro_batch_deviation": self.micro_batch_deviation,
        }


def inspect_data(run: RunConfig, num_ranks: int) -> DataReport:
    """Plans epoch 0 and counts what each rank would get.

    Args:
        run: The run.
        num_ranks: Ranks on the data axis.

    Returns:
        The counts and their deviations.

    Raises:
        DataError: If data is missing or damaged.
        ConfigError: If the batch doesn't divide, or settings don't fit the data.
    """
    batching_of(run, num_shards=num_ranks)  # A batch that doesn't divide is told of before the data is opened.
    datasets = open_data(run.data)
    source = datasets.train
    sampler = sampler_of(run, source, num_shards=num_ranks)
    ids_R = [sampler.epoch_parts(0, shard) for shard in range(num_ranks)]
    num_classes = len(datasets.class_names)
    counts_RC = np.array([np.bincount(source.labels_N[ids], minlength=num_classes) for ids, _ in ids_R], dtype=np.int64)
    share_C = counts_RC.sum(axis=0) / counts_RC.sum()
    costs_R = np.array([source.costs(ids).sum() for ids, _ in ids_R])
    return DataReport(
        class_names=datasets.class_names,
        counts_RC=counts_RC,
        costs_R=costs_R,
        cost_unit=source.cost_unit,
        num_updates=sampler.num_updates,
        num_dropped=sampler.num_dropped,
        num_eval=datasets.eval.num_samples,
        largest_deviation=float(np.abs(counts_RC - counts_RC.mean(axis=0)).max()),
        micro_batch_deviation=max(
            micro_batch_deviation(source.labels_N[ids], sizes_P, share_C=share_C) for ids, sizes_P in ids_R
        ),
    )


def micro_batch_deviation(
    labels: npt.NDArray[np.integer[Any]],
    sizes_P: npt.NDArray[np.int64],
    *,
    share_C: npt.NDArray[np.float64],
) -> float:
    """Largest difference between the samples of a class in a micro-batch and its share.

    Args:
        labels: Classes of all samples, micro-batch after micro-batch.
        sizes_P: Samples per micro-batch.
        share_C: Share of each class in all samples.

    Returns:
        The difference in samples.
    """
    num_classes = len(share_C)
    step = max(1, _CHUNK_CELLS // num_classes)
    ends = np.cumsum(sizes_P)
    largest = 0.0
    for first in range(0, len(sizes_P), step):
        sizes = sizes_P[first : first + step]
        start = int(ends[first] - sizes_P[first])
        cells = np.repeat(np.arange(len(sizes)), sizes) * num_classes + labels[start : start + int(sizes.sum())]
        counts_PC = np.bincount(cells, minlength=len(sizes) * num_classes).reshape(len(sizes), num_classes)
        largest = max(largest, float(np.abs(counts_PC - sizes[:, None] * share_C).max(initial=0.0)))
    return largest
