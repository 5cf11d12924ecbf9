"""Two real processes under DistributedDataParallel: ranks must agree on every topology."""

import socket

import torch
import torch.multiprocessing as mp
from torch import nn

import sparsight as sp


def worker(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = sp.sparsify(net, optimizer, density=0.3, method=sp.rigl(steps=40, every=5, end=1.0))
    for step in range(40):
        x, y = shard(step, rank)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    torch.save((net.state_dict(), sparse.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def shard(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of opposite sign on the ranks, so that a mean of |g| is another thing than |mean g|."""
    x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    y = torch.stack([x[:, i].sin() * (1 if i < 2 else (-1) ** rank * 3) for i in range(4)], 1)
    return x[rank::2], y[rank::2]


def test_ranks_agree_and_equal_one_process_with_the_whole_batch(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    (weights, sparse), (other_weights, other) = (torch.load(tmp_path / f"{r}.pt") for r in (0, 1))
    for key, value in sparse.items():
        assert torch.equal(value, other[key]), key
    for key, value in weights.items():
        assert torch.equal(value, other_weights[key]), key

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    alone = sp.sparsify(net, optimizer, density=0.3, method=sp.rigl(steps=40, every=5, end=1.0))
    for step in range(40):
        optimizer.zero_grad()
        losses = [(net(x) - y).square().mean() for x, y in (shard(step, r) for r in (0, 1))]
        (sum(losses) / 2).backward()
        optimizer.step()
    assert alone.updates == int(sparse["updates"]) >= 6
    for key, value in alone.state_dict().items():
        assert torch.equal(value, sparse[key]), key
    torch.testing.assert_close(net.state_dict(), weights)
