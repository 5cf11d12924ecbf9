"""Balancers: values that can be known, gradients that are finite, biases that move once a step."""

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.moe.routing import Routing, choices


def uniform(tokens, experts, k):
    prob = torch.full((tokens, experts), 1 / experts, requires_grad=True)
    chosen = (torch.arange(tokens)[:, None] * k + torch.arange(k)) % experts
    return choices(chosen, prob.gather(1, chosen), prob, prob.log())


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_switch_loss_is_one_at_balance_for_every_k_and_more_when_loads_follow_probabilities(k):
    even = uniform(24, 4, k)
    assert sp.SwitchLoss(1.0).loss(even, {}, 0).item() == pytest.approx(1)
    torch.manual_seed(k)
    for _ in range(50):
        lean = 2 * torch.randn(4)
        prob = lean.softmax(0).expand(24, 4)
        chosen = prob.topk(k).indices
        routing = choices(chosen, prob.gather(1, chosen), prob, prob.log())
        assert sp.SwitchLoss(1.0).loss(routing, {}, 0).item() >= 1 - 1e-6


def test_switch_loss_per_sequence_is_the_mean_of_the_sequences():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, k=2, balance=sp.SwitchLoss(1.0, over="sequence"))
    x = torch.randn(3, 10, 8)
    moe(x)
    got = sp.balance_loss(moe)
    each = []
    for row in x:
        alone = sp.MoE(8, 8, experts=4, k=2, balance=sp.SwitchLoss(1.0))
        alone.load_state_dict(moe.state_dict(), strict=False)
        alone(row)
        each.append(sp.balance_loss(alone))
    torch.testing.assert_close(got, torch.stack(each).mean())
    moe(x[0])
    with pytest.raises(ValueError, match=r"sequence, dim"):
        sp.balance_loss(moe)


def test_switch_loss_over_the_global_batch_sees_all_micro_batches():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, balance=sp.SwitchLoss(1.0, over="global"))
    a, b = torch.randn(16, 8), torch.randn(16, 8)
    moe(a)
    first = moe.routing
    sp.balance_loss(moe)
    moe(b)
    load = (first.load() + moe.routing.load()).float()
    expected = 4 * (load / load.sum() * moe.routing.prob.mean(0)).sum()
    torch.testing.assert_close(sp.balance_loss(moe).detach(), expected)
    moe.after_step()
    moe(b)
    load = moe.routing.load().float()
    expected = 4 * (load / load.sum() * moe.routing.prob.mean(0)).sum()
    torch.testing.assert_close(sp.balance_loss(moe).detach(), expected)


def test_importance_and_entropy_have_finite_gradients_at_perfect_balance():
    for balancer in (sp.ImportanceLoss(1.0), sp.EntropyLoss(1.0, token=1.0)):
        routing = uniform(8, 4, 1)
        loss = balancer.loss(routing, {}, 0)
        (grad,) = torch.autograd.grad(loss, routing.prob)
        assert torch.isfinite(grad).all()
    assert sp.ImportanceLoss(1.0).loss(uniform(8, 4, 1), {}, 0).item() == pytest.approx(0, abs=1e-6)
    hard = torch.eye(4)
    routing = Routing(torch.arange(4), torch.arange(4), torch.ones(4), hard.requires_grad_(), hard)
    loss = sp.EntropyLoss(1.0, token=1.0).loss(routing, {}, 0)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(torch.autograd.grad(loss, hard)[0]).all()


def test_coefficients_follow_a_schedule_by_optimizer_steps():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, balance=sp.ZLoss(sp.linear(0.0, 1.0, end=2)))
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    sp.follow_steps(moe, optimizer)
    seen = []
    x = torch.randn(16, 8)
    for _ in range(4):
        for _ in range(2):  # micro-batches do not move the schedule
            loss = moe(x).sum() * 0 + sp.balance_loss(moe)
            loss.backward()
        seen.append(loss.item())
        optimizer.step()
    assert seen[0] == 0
    assert seen[1] == pytest.approx(seen[2] / 2)
    assert seen[2] == seen[3]


def test_loss_free_bias_moves_by_the_rate_against_the_load_once_a_step():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, balance=sp.LossFreeBias(0.01))
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    sp.follow_steps(moe, optimizer)
    total = torch.zeros(4)
    for _ in range(3):
        moe(torch.randn(16, 8)).sum().backward()
        total += moe.routing.load()
        assert not moe.ledger.bias().any()
    optimizer.step()
    torch.testing.assert_close(moe.ledger.bias(), 0.01 * (total.mean() - total).sign())
    moe.eval()(torch.randn(16, 8))
    assert not moe.ledger.load.any()
    assert "ledger.memory.0.bias" in moe.state_dict()


def test_loss_free_bias_evens_out_a_lopsided_router():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, balance=sp.LossFreeBias(0.005))
    with torch.no_grad():
        moe.router.weight[0] += 0.2
    x = torch.randn(256, 8) + 1
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    sp.follow_steps(moe, optimizer)
    spread = []
    for _ in range(120):
        moe(x).sum().backward()
        load = moe.routing.load().float()
        spread.append(((load.max() - load.mean()) / load.mean()).item())
        optimizer.step()
    assert max(spread[-10:]) < 0.3 < 1.0 < spread[0]


def test_losses_add_up_over_passes_layers_and_balancers_and_begin_anew_when_read():
    torch.manual_seed(0)
    shared = sp.MoE(8, 8, experts=4, balance=[sp.SwitchLoss(1.0), sp.ZLoss(1.0)])
    model = nn.Sequential(shared, shared, sp.MoE(8, 8, experts=4, balance=sp.ZLoss(1.0)))
    x = torch.randn(16, 8)
    model(x)
    once = sp.balance_loss(model).item()
    assert once == sp.balance_loss(model).item()  # reading twice is harmless
    model(x)
    assert sp.balance_loss(model).item() == pytest.approx(once)
    parts = []
    for layer_input in (x, shared(x)):
        sp.balance_loss(model)
        shared(layer_input)
        parts.append(sp.balance_loss(shared).item())
    sp.balance_loss(model)
    model(x)
    last = model[2].ledger.collect().item()
    assert once == pytest.approx(sum(parts) + last, rel=1e-5)
    assert sp.balance_loss(nn.Linear(2, 2)).item() == 0


def test_a_forgotten_balance_loss_and_a_forgotten_optimizer_are_told():
    x = torch.randn(4, 8)
    moe = sp.MoE(8, 8, experts=4, balance=sp.SwitchLoss())
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    sp.follow_steps(moe, optimizer)
    moe(x).sum().backward()
    with pytest.warns(UserWarning, match="add sp.balance_loss"):
        optimizer.step()
    biased = sp.MoE(8, 8, experts=4, balance=sp.LossFreeBias())
    for _ in range(200):
        biased(x)
    with pytest.warns(UserWarning, match=r"sp.follow_steps"):
        biased(x)
    with pytest.raises(ValueError, match="no MoE"):
        sp.follow_steps(nn.Linear(2, 2), optimizer)
    with pytest.raises(ValueError, match="has the estimator Reinforce"):
        sp.reinforce_loss(moe, torch.zeros(()))


def test_reinforce_takes_a_loss_per_token_and_refuses_another_count():
    moe = sp.MoE(8, 8, experts=4, estimator=sp.Reinforce())
    each = moe(torch.randn(6, 8)).square().mean(1)
    (each.mean() + sp.reinforce_loss(moe, each)).backward()
    assert moe.router.weight.grad.any()
    moe(torch.randn(6, 8))
    with pytest.raises(ValueError, match="each of 6 tokens, got 5"):
        sp.reinforce_loss(moe, torch.zeros(5))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_switch_loss_is_exactly_one_at_uniform_routing_for_every_k(k):
    experts, tokens = 4, 8
    prob = torch.full((tokens, experts), 1 / experts)
    token = torch.arange(tokens).repeat(k)
    expert = torch.cat([(torch.arange(tokens) + j) % experts for j in range(k)])
    routing = Routing(token, expert, prob[token, expert], prob, prob.log())
    assert sp.SwitchLoss(1.0).loss(routing, {}, 0).item() == 1.0


def test_switch_loss_is_at_least_one_where_loads_follow_probabilities_and_may_be_less_where_they_do_not():
    prob = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.6, 0.4]], dtype=torch.float64)
    with_it = Routing(torch.arange(4), torch.tensor([0, 1, 1, 1]), prob[:, 0], prob, prob.log())
    against = Routing(torch.arange(4), prob.argmax(1), prob.amax(1), prob, prob.log())
    # P = (0.475, 0.525): 2·(¼·0.475 + ¾·0.525) and 2·(¾·0.475 + ¼·0.525)
    assert sp.SwitchLoss(1.0).loss(with_it, {}, 0).item() == pytest.approx(1.025)
    assert sp.SwitchLoss(1.0).loss(against, {}, 0).item() == pytest.approx(0.975)
