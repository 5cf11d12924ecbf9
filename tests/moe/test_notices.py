"""What was forgotten is told early and at the user's line, and what was not forgotten is not told."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparsight as sp


def run(moe, steps, *, follow=False, ask=False, micro=1, again=False, move=True):
    optimizer = torch.optim.Adam(moe.parameters(), lr=0.01)
    if follow:
        sp.follow_steps(moe, optimizer)
    for _ in range(steps):
        for _ in range(micro):
            x = torch.randn(8, 4)
            loss = (checkpoint(moe, x, use_reentrant=False) if again else moe(x)).square().mean()
            (loss + sp.balance_loss(moe) if ask else loss).backward()
        if move:
            optimizer.step()


@pytest.mark.parametrize(
    ("balance", "told"),
    [(sp.LossFreeBias(), "Call sp.follow_steps"), (sp.SwitchLoss(), "add sp.balance_loss")],
)
def test_a_handful_of_steps_is_enough_and_the_place_is_the_users(balance, told):
    moe = sp.MoE(4, 8, experts=2, balance=balance)
    with pytest.warns(UserWarning, match=told) as seen:
        run(moe, 5)
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_with_steps_followed_the_first_step_tells_of_a_forgotten_loss():
    moe = sp.MoE(4, 8, experts=2, balance=sp.SwitchLoss())
    with pytest.warns(UserWarning, match="an optimizer step came before") as seen:
        run(moe, 1, follow=True)
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    "way",
    [
        {"follow": True, "ask": True},
        {"follow": True, "ask": True, "micro": 4},
        {"follow": True, "ask": True, "again": True},
        {"ask": True, "micro": 6, "move": False},  # gradients gathered for longer than a handful of passes
    ],
)
def test_no_false_alarm(way):
    moe = sp.MoE(4, 8, experts=2, balance=(sp.LossFreeBias(), sp.SwitchLoss()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(moe, 8, **way)
        moe.eval()
        for _ in range(300):
            moe(torch.randn(2, 4))


def test_a_switch_loss_alone_needs_no_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(sp.MoE(4, 8, experts=2, balance=sp.SwitchLoss()), 6, ask=True)


def test_a_copied_optimizer_follows_nobody_and_that_is_told():
    moe = nn.Sequential(sp.MoE(4, 8, experts=2, balance=sp.LossFreeBias()))
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    sp.follow_steps(moe, optimizer)
    twin, other = copy.deepcopy((moe, optimizer))

    def train():
        for _ in range(6):
            twin(torch.randn(8, 4)).square().mean().backward()
            other.step()

    with pytest.warns(UserWarning, match="Call sp.follow_steps"):
        train()
