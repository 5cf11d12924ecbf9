"""Two real processes under DistributedDataParallel: the counts are those of the global batch."""

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import sparsight as sp

STEPS, BATCH, DIM, E = 6, 16, 8, 4
ALIKE = [
    "tokens_per_expert", "idle_steps", "update_freq", "load_entropy", "load_cv", "max_vio", "router_entropy",
    "routing_mi", "gate_top1_prob", "z_loss", "load_balancing_loss", "expert_loss", "grad_norm",
    "router_grad_norm", "drop_rate",
]  # fmt: skip


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), sp.MoE(DIM, 16, experts=E, k=2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step))


def loop(
    model: nn.Module, watch: sp.Watch, optimizer: torch.optim.Optimizer, shards: slice, tell: bool
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = model(batch(step)[shards]).square().mean(-1)
        if tell:
            watch.losses(losses)
        losses.mean().backward()
        optimizer.step()


def work(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    net = build()
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sink = sp.sinks.JSONL(f"{folder}/{rank}.jsonl")
    with sp.watch(model, optimizer, f"{folder}/two", every=2, sinks=[sink]) as watch:
        assert (watch.run is None) == (rank == 1)
        loop(model, watch, optimizer, slice(rank, None, 2), tell=True)
        watch.log(loss=1.0)
    again = {"resume": True, "every": 2}
    with sp.watch(model, optimizer, f"{folder}/two", **again) as watch:
        assert watch.step == STEPS  # on both
        # Only one of them tells its losses: nobody waits for the other.
        loop(model, watch, optimizer, slice(rank, None, 2), tell=rank == 0)
    dist.destroy_process_group()


def test_counts_of_two_processes_are_those_of_one_with_the_whole_batch(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path)), nprocs=2)

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sp.watch(model, optimizer, tmp_path / "one", every=2) as watch:
        loop(model, watch, optimizer, slice(None), tell=True)
    one, two = sp.load_run(tmp_path / "one"), sp.load_run(tmp_path / "two").until(STEPS)
    for name in ALIKE:
        alone, both = one.get(f"moe/{name}", "1"), two.get(f"moe/{name}", "1")
        assert both.steps.tolist() == alone.steps.tolist() == [2, 4, 6], name
        np.testing.assert_allclose(both.values, alone.values, rtol=1e-3, atol=1e-5, err_msg=name)
    assert one.get("moe/tokens_per_expert", "1").values.sum(1).tolist() == [2 * 2 * BATCH] * 3
    assert [route["name"] for route in two.meta["layers"]] == [route["name"] for route in one.meta["layers"]]
    assert (tmp_path / "0.jsonl").exists()
    assert not (tmp_path / "1.jsonl").exists()
    assert sp.load_run(tmp_path / "two").last_step == pytest.approx(2 * STEPS)
