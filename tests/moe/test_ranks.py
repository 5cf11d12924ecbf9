"""Over two processes: one load, one bias, one global loss."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import sparsight as sp


def work(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, balance=[sp.LossFreeBias(0.01), sp.SwitchLoss(1.0, over="global")])
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    sp.follow_steps(moe, optimizer)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank))
    moe(x)
    loss = sp.balance_loss(moe)
    loss.backward()
    optimizer.step()
    results[rank] = (
        moe.routing.load().tolist(),
        moe.ledger.bias().tolist(),
        loss.item(),
        moe.routing.prob.mean(0).tolist(),
    )
    dist.destroy_process_group()


def test_ranks_agree_on_the_load_of_both():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, args=(port, results), nprocs=2)
        (load0, bias0, loss0, p0), (load1, bias1, loss1, p1) = results[0], results[1]
    total = torch.tensor(load0) + torch.tensor(load1)
    assert load0 != load1
    expected = 0.01 * (total.float().mean() - total).sign()
    torch.testing.assert_close(torch.tensor(bias0), expected)
    assert bias0 == bias1
    for loss, p in ((loss0, p0), (loss1, p1)):
        torch.testing.assert_close(torch.tensor(loss), 4 * (total / total.sum() * torch.tensor(p)).sum())
