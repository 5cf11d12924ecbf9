"""The estimators' bias, to machine precision: every outcome enumerated, no seed."""

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.moe import oracle

DEGREE = {
    "euler": 1,
    "midpoint": 2,
    "heun3": 3,
    "simpson": 4,
    "gauss2": 4,
    "radau": 5,
    "gauss3": 6,
    "lobatto": 6,
}


def case(experts, dim=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(experts, generator=g, dtype=torch.float64)
    return z, torch.randn(experts, dim, generator=g, dtype=torch.float64)


def polynomial(degree):
    return lambda y: sum((i + 1.5) * (y.sum() + 0.3 * y[0]) ** i for i in range(degree + 1))


@pytest.mark.parametrize("experts", [2, 3, 5])
@pytest.mark.parametrize("name", DEGREE)
def test_a_rule_is_unbiased_up_to_its_degree_and_no_further(name, experts):
    rule = getattr(sp, name)
    z, outputs = case(experts)
    for degree in range(DEGREE[name] + 1):
        bias = oracle.bias(rule, polynomial(degree), z, outputs)
        scale = oracle.exact_gradient(polynomial(degree), z, outputs).abs().max().clamp_min(1)
        assert bias.abs().max() / scale < 1e-13
    assert oracle.relative_bias(rule, polynomial(DEGREE[name] + 1), z, outputs) > 1e-6


def test_higher_order_rules_are_closer_on_an_mlp():
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    order = ["euler", "midpoint", "heun3", "simpson", "gauss3"]
    mean = dict.fromkeys(order, 0.0)
    for seed in range(10):
        z, outputs = case(4, dim=3, seed=seed)
        for name in order:
            mean[name] += oracle.relative_bias(getattr(sp, name), lambda y: f(y).sum(), z, outputs) / 10
    values = [mean[name] for name in order]
    assert values == sorted(values, reverse=True)
    assert mean["gauss3"] < 1e-4 < mean["euler"]


def test_gating_only_keeps_half_and_is_biased():
    z, outputs = case(4)
    linear = oracle.relative_bias(sp.GatingOnly(sample=True), polynomial(1), z, outputs)
    assert abs(linear - 0.5) < 1e-12
    assert oracle.bias(sp.euler, polynomial(1), z, outputs).abs().max() < 1e-13


def test_euler_on_argmax_has_the_bias_it_has():
    """On a quadratic, E_D·∂p_D·(f'(a) − f'(a/2)) is what the argmax outcome adds: a closed form."""
    z, outputs = case(3)

    def f(y):
        return y.square().sum()

    loud = sp.Quadrature((0.5,), (1.0,), euler_on_argmax=True)
    bias = oracle.bias(loud, f, z, outputs)
    p = z.softmax(0)
    best = int(p.argmax())
    a = p[best] * outputs[best]
    slope = (outputs[best] * (2 * a - a)).sum()
    expected = p[best] * slope * (p[best] * (torch.eye(3)[best].double() - p))
    torch.testing.assert_close(bias, expected)
    assert oracle.bias(sp.midpoint, f, z, outputs).abs().max() < 1e-13


def test_sparsemixer_with_mask_is_unbiased_for_its_own_distribution():
    z = torch.tensor([1.0, 0.95, -3.0, 0.9], dtype=torch.float64)
    _, outputs = case(4)
    star = sp.SparseMixer2Star()
    assert oracle.bias(star, polynomial(3), z, outputs).abs().max() < 1e-12
    v1 = sp.SparseMixer(euler_on_argmax=False)
    assert oracle.bias(v1, polynomial(2), z, outputs).abs().max() < 1e-12
    assert oracle.relative_bias(sp.SparseMixer(), polynomial(2), z, outputs) > 0.01


def test_straight_through_is_exact_for_linear_functions():
    z, outputs = case(4)
    assert oracle.bias(sp.StraightThrough(), polynomial(1), z, outputs).abs().max() < 1e-13
    assert oracle.relative_bias(sp.StraightThrough(), polynomial(2), z, outputs) > 1e-3


def test_what_the_layer_draws_is_what_the_oracle_lists():
    """Many draws through `__call__` converge on the enumerated expectation."""
    torch.manual_seed(0)
    z, outputs = case(3)
    f = polynomial(2)
    for rule in (sp.midpoint, sp.simpson, sp.SparseMixer(r=0.5)):
        many = z.expand(200_000, -1).clone().requires_grad_()
        routing = rule(many, 1)
        y = routing.weight[:, None] * outputs[routing.expert]
        total = sum((i + 1.5) * (y.sum(1) + 0.3 * y[:, 0]) ** i for i in range(3))
        total.sum().backward()
        mean, error = many.grad.mean(0), many.grad.std(0) / 200_000**0.5
        expected = oracle.expected_gradient(rule, f, z, outputs)
        assert ((mean - expected).abs() < 5 * error + 1e-12).all()


def test_reinforce_is_unbiased_for_any_baseline():
    z, outputs = case(4)
    f = polynomial(3)
    exact = oracle.exact_gradient(f, z, outputs)
    for baseline in (0.0, 2.5):
        live = z.clone().requires_grad_()
        p = live.softmax(0)
        total = torch.zeros(4, dtype=torch.float64)
        for d in range(4):
            value = f(p[d] * outputs[d])
            surrogate = value + (value.detach() - baseline) * p[d].log()
            total += p[d].detach() * torch.autograd.grad(surrogate, live, retain_graph=True)[0]
        torch.testing.assert_close(total, exact)


def test_quadrature_refuses_rules_that_are_none():
    with pytest.raises(ValueError, match="as many weights as nodes"):
        sp.Quadrature((0.5,), (0.5, 0.5))
    with pytest.raises(ValueError, match="add up to 1"):
        sp.Quadrature((0.5,), (0.9,))
    with pytest.raises(ValueError, match="lie in"):
        sp.Quadrature((1.5,), (1.0,))
