"""Checkpoints and the sync check in a plain PyTorch loop."""

import pytest

torch = pytest.importorskip("torch")

import convmesh  # noqa: E402
from convmesh.errors import CheckpointError, SyncError  # noqa: E402

pytestmark = pytest.mark.torch


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.LazyLinear(3)
    )


def train(net, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def make(optimizer_class):
    net = network()
    net(torch.zeros(2, 1, 8, 8))
    return net, optimizer_class(net.parameters(), lr=0.05)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_loop_goes_on_where_it_was(tmp_path, name):
    kind = getattr(torch.optim, name)
    kind = (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)) if name == "SGD" else kind
    net, optimizer = make(kind)
    train(net, optimizer, 3, seed=1)
    convmesh.save_checkpoint(tmp_path, net, optimizer, update=3)
    train(net, optimizer, 2, seed=2)
    other, other_optimizer = make(kind)
    assert convmesh.load_checkpoint(tmp_path, other, other_optimizer) == 3
    train(other, other_optimizer, 2, seed=2)
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def test_another_network_is_refused_with_all_names(tmp_path):
    net, _ = make(torch.optim.SGD)
    convmesh.save_checkpoint(tmp_path, net, update=1)
    with pytest.raises(CheckpointError) as caught:
        convmesh.load_checkpoint(tmp_path, torch.nn.Linear(2, 2))
    assert "0.weight" in str(caught.value)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        convmesh.load_checkpoint(tmp_path, net, torch.optim.SGD(net.parameters()))
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        convmesh.load_checkpoint(tmp_path / "elsewhere", net)


def test_sync_of_one_rank_holds_and_a_difference_is_named():
    net, _ = make(torch.optim.SGD)
    convmesh.check_sync(net)
    with pytest.raises(SyncError, match=r"'0\.weight' after epoch 2: rank 1"):
        convmesh.check_sync(net, when="after epoch 2", all_gather=lambda sums: [sums, {**sums, "0.weight": 1}])
