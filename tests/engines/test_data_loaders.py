"""The samplers in the data loaders of both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convmesh.data.adapters import ShardBatches, ShardIds
from convmesh.data.samplers import Batching, Sampler, make_sampler

IMAGES = np.arange(50, dtype=np.float32)


def _sampler() -> Sampler[Any]:
    return make_sampler("stratified", (np.arange(50) % 3).astype(np.int32), batching=Batching(8, 2, 2))


def _expected(epoch: int) -> list[list[int]]:
    sampler = _sampler()
    return [part.tolist() for update in range(sampler.num_updates) for part in sampler.micro_batches(epoch, update, 1)]


@pytest.mark.torch
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_data_loader(num_workers: int) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES))
    batches = ShardBatches(_sampler(), shard=1)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, num_workers=num_workers)
    for epoch in range(2):
        batches.set_epoch(epoch)
        assert [x.int().tolist() for (x,) in loader] == _expected(epoch)
        assert len(loader) == len(_expected(epoch))


@pytest.mark.mindspore
def test_mindspore_generator_dataset() -> None:
    dataset = pytest.importorskip("mindspore.dataset")
    ids = ShardIds(_sampler(), shard=1)
    for epoch in range(2):
        ids.set_epoch(epoch)
        loader = dataset.GeneratorDataset(IMAGES[:, None], ["image"], sampler=ids).batch(2)
        found = [x[:, 0].astype(int).tolist() for (x,) in loader.create_tuple_iterator(num_epochs=1, output_numpy=True)]
        assert found == _expected(epoch)
