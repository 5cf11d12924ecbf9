"""Number for number with transformers (PhiMoE, Switch) and SciPy."""

import numpy as np
import pytest
import torch
from scipy import optimize as scipy_optimize
from transformers.models.phimoe import modeling_phimoe as phimoe
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import sparsight as sp
from sparsight.moe import gates
from sparsight.moe.assignment import balanced_assignment, room
from sparsight.moe.routing import choices


@pytest.fixture
def same_draws(monkeypatch):
    """Draw what PhiMoE draws.

    It draws exponentials with `exponential_`; and its second round draws its coin twice and forgets the
    first, so let it keep that one.
    """
    monkeypatch.setattr(gates, "exponential", lambda like: torch.empty_like(like).exponential_())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, *_, **__: self)


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("r", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparsemixer2_is_phimoe(training, r, dtype):
    torch.manual_seed(1)
    z = torch.randn(300, 8, dtype=dtype)
    seed = torch.randn(300, 2, dtype=dtype)
    theirs, ours = z.clone().requires_grad_(), z.clone().requires_grad_()
    torch.manual_seed(7)
    weight, expert = phimoe.sparsemixer(theirs, jitter_eps=r, training=training)
    torch.manual_seed(7)
    routing = sp.SparseMixer2(r=r)(ours, 2, training=training)
    assert torch.equal(routing.expert.view(2, -1).t(), expert)
    torch.testing.assert_close(routing.weight.view(2, -1).t(), weight, rtol=0, atol=0)
    weight.backward(seed)
    routing.weight.backward(seed.t().reshape(-1))
    tight = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=tight)


@pytest.mark.usefixtures("same_draws")
def test_a_whole_phimoe_block_agrees_with_the_layer():
    """Same router, same experts, same draws: outputs and every gradient."""
    config = phimoe.PhimoeConfig(
        hidden_size=16,
        intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_jitter_noise=0.2,
        input_jitter_noise=0.0,
    )
    config._experts_implementation = "eager"
    block = phimoe.PhimoeSparseMoeBlock(config).train()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.manual_seed(0)
    layer = sp.MoE(16, 24, 4, k=2, expert="glu", estimator=sp.SparseMixer2(r=0.2))
    with torch.no_grad():
        layer.router.weight.copy_(block.router.weight)
        for e, expert in enumerate(layer.experts):
            expert.gate_up.weight.copy_(block.experts.gate_up_proj[e])
            expert.down.weight.copy_(block.experts.down_proj[e])
    x = torch.randn(2, 40, 16)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(3)
    expected = block(theirs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.manual_seed(3)
    y = layer(ours)
    torch.testing.assert_close(y, expected)
    seed = torch.randn_like(y)
    y.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for e, expert in enumerate(layer.experts):
        torch.testing.assert_close(expert.gate_up.weight.grad, block.experts.gate_up_proj.grad[e])
        torch.testing.assert_close(expert.down.weight.grad, block.experts.down_proj.grad[e])


@pytest.mark.parametrize("experts", [2, 8])
def test_switch_and_z_loss_are_transformers(experts):
    torch.manual_seed(0)
    z = torch.randn(1, 50, experts)
    p = z.softmax(-1)
    chosen = p.argmax(-1)
    routing = choices(chosen[0][:, None], p[0].amax(-1, keepdim=True), p[0], z[0])
    theirs = switch.load_balancing_loss_func(p, chosen)
    torch.testing.assert_close(sp.SwitchLoss(1.0).loss(routing, {}, 0), theirs)
    torch.testing.assert_close(sp.ZLoss(1.0).loss(routing, {}, 0), switch.router_z_loss_func(z))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 3), (7, 3), (12, 4), (64, 8), (50, 16), (300, 12)])
def test_base_is_scipys_linear_assignment(tokens, experts):
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(tokens, experts, generator=g) * (1 + 3 * seed) + 2 * torch.randn(experts, generator=g)
        mine = balanced_assignment(z).numpy()
        # As many columns as there is room; where T/E is not whole, the first experts have one more.
        columns = np.repeat(np.arange(experts), room(tokens, experts))
        rows, places = scipy_optimize.linear_sum_assignment(z.double().numpy()[:, columns], maximize=True)
        best = z.double().numpy()[rows, columns[places]].sum()
        assert np.bincount(mine, minlength=experts).tolist() == room(tokens, experts)
        got = z.double().numpy()[np.arange(tokens), mine].sum()
        assert got == pytest.approx(best, abs=1e-9 * max(1, abs(best)))
        assert mine.tolist() == columns[places].tolist()  # ties have probability zero here


def test_base_with_ties_and_collapsed_scores():
    for z in (
        torch.zeros(10, 4),
        torch.tensor([[1.0, 0.0, 0.0]]).repeat(9, 1),
        torch.ones(6, 2).double() * 1e6,
    ):
        load = torch.bincount(balanced_assignment(z), minlength=z.shape[1])
        assert load.tolist() == room(*z.shape)
