"""Dispatch and combine agree with an obvious loop over tokens, gradients included."""

import copy

import pytest
import torch
from torch import nn

from sparsight.moe.capacity import Capacity
from sparsight.moe.dispatch import dispatch, dispatch_any
from sparsight.moe.experts import GLU, MLP
from sparsight.moe.pool import Pool
from sparsight.moe.routing import Routing

KINDS = {
    "glu": lambda: GLU(3, 5),
    "glu bias gelu": lambda: GLU(3, 5, activation="gelu", bias=True),
    "mlp": lambda: MLP(3, 5),
    "mlp bias relu": lambda: MLP(3, 4, activation="relu", bias=True),
    "mlp tanh gelu": lambda: MLP(3, 4, activation="gelu_tanh"),
}
# Token 2 goes nowhere, token 0 twice to two experts, expert 3 gets nobody.
TOKEN = torch.tensor([0, 1, 3, 0, 4, 1])
EXPERT = torch.tensor([2, 0, 0, 1, 2, 2])


def make(kind, through=False):
    torch.manual_seed(0)
    experts = nn.ModuleList(KINDS[kind]() for _ in range(4)).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    prob = torch.rand(5, 4, dtype=torch.float64)
    other = torch.rand(6, dtype=torch.float64) if through else None
    return experts, x, weight, lambda w: Routing(TOKEN, EXPERT, w, prob, prob, expert_weight=other)


def loop(x, experts, weight):
    rows = [torch.zeros(3, dtype=torch.float64) for _ in range(5)]
    for n in range(6):
        t, e = int(TOKEN[n]), int(EXPERT[n])
        rows[t] = rows[t] + weight[n] * experts[e](x[t])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient_equal_a_loop_over_tokens(kind):
    experts, x, weight, routing = make(kind)
    seed = torch.randn(5, 3, dtype=torch.float64)
    inputs = [x, weight, *experts.parameters()]
    y = dispatch(x, routing(weight), experts, Pool())
    expected = loop(x, experts, weight)
    torch.testing.assert_close(y, expected)
    for got, want in zip(
        torch.autograd.grad(y, inputs, seed, allow_unused=True),
        torch.autograd.grad(expected, inputs, seed, allow_unused=True),
        strict=True,
    ):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    experts, x, weight, routing = make(kind)
    if kind == "mlp bias relu":
        x = (x.detach() * 3).requires_grad_()

    def run(x, weight, *_):
        return dispatch(x, routing(weight), experts, Pool())

    active = [p for e in (0, 1, 2) for p in experts[e].parameters()]
    assert torch.autograd.gradcheck(run, (x, weight, *active))


@pytest.mark.parametrize("kind", ["glu", "mlp bias relu"])
def test_expert_weight_scales_what_reaches_the_expert_and_nothing_else(kind):
    experts, x, weight, routing = make(kind, through=True)
    plain_y = loop(x, experts, weight)
    results = []
    for run in (lambda r: dispatch(x, r, experts, Pool()), lambda r: dispatch_any(x, r, experts)):
        y = run(routing(weight))
        torch.testing.assert_close(y, plain_y)
        results.append(torch.autograd.grad(y.square().sum(), [x, weight, experts[0].down.weight]))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)
    (plain,) = torch.autograd.grad(plain_y.square().sum(), [experts[0].down.weight])
    assert not torch.allclose(results[0][2], plain)


def test_idle_experts_get_no_gradient_at_all():
    experts, x, weight, routing = make("glu")
    dispatch(x, routing(weight), experts, Pool()).sum().backward()
    assert all(p.grad is None for p in experts[3].parameters())
    assert all(p.grad is not None for e in (0, 1, 2) for p in experts[e].parameters())


def test_no_assignment_gives_zero():
    experts, x, _, _ = make("glu")
    none = torch.zeros(0, dtype=torch.long)
    prob = torch.rand(5, 4, dtype=torch.float64)
    y = dispatch(x, Routing(none, none, torch.zeros(0, dtype=torch.float64), prob, prob), experts, Pool())
    y.sum().backward()
    assert not y.any()
    assert not x.grad.any()


def big(pool, seed):
    torch.manual_seed(seed)
    experts = nn.ModuleList(GLU(64, 256) for _ in range(4))
    x = torch.randn(512, 64, requires_grad=True)
    prob = torch.randn(512, 4).softmax(1)
    routing = Routing(torch.arange(512), prob.argmax(1), prob.amax(1), prob, prob.log())
    return experts, x, dispatch(x, routing, experts, pool)


def test_memory_is_used_again_and_never_while_someone_holds_it():
    pool = Pool()
    kept = []
    for seed in range(3):
        experts, x, y = big(pool, seed)
        y.square().sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in experts.parameters()]
        kept.append(([p.grad for p in experts.parameters()], first))
        for p in experts.parameters():
            p.grad = None
        big(pool, 99)[2].sum().backward()
        y.square().sum().backward()  # the graph's buffers must have survived the other pass
        for p, before in zip(experts.parameters(), first, strict=True):
            torch.testing.assert_close(p.grad, before)
    for held, copies in kept:
        for a, b in zip(held, copies, strict=True):
            torch.testing.assert_close(a, b)
    del kept, held, copies, experts, x, y, first, p, before, a, b
    assert pool.waiting > 0
    assert copy.deepcopy(pool).waiting == 0


def test_the_second_step_allocates_no_large_buffer():
    pool = Pool()
    torch.manual_seed(0)
    experts = nn.ModuleList(GLU(64, 256) for _ in range(4))
    prob = torch.randn(512, 4).softmax(1)
    routing = Routing(torch.arange(512), prob.argmax(1), prob.amax(1), prob, prob.log())
    x = torch.randn(512, 64, requires_grad=True)
    held = []
    for _ in range(3):
        dispatch(x, routing, experts, pool).sum().backward()
        x.grad = None
        for p in experts.parameters():
            p.grad = None
        held.append(pool.waiting)
    assert held[0] == held[1] == held[2] > 0


def test_capacity_keeps_first_choices_before_second_and_counts_the_rest():
    prob = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]])
    routing = Routing(
        torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1]), torch.rand(6), prob, prob.log()
    )
    kept, dropped = Capacity(2 / 3).keep(routing, k=2, training=True)
    assert dropped == 2
    assert kept.token.tolist() == [0, 1, 0, 1]
    by_prob, _ = Capacity(2 / 3, drop="prob").keep(routing, k=2, training=True)
    assert by_prob.token.tolist() == [1, 2, 0, 2]
    nothing, zero = Capacity(2 / 3, eval_factor=float("inf")).keep(routing, k=2, training=False)
    assert nothing is routing
    assert zero == 0
    wide, none = Capacity(0.01, minimum=3).keep(routing, k=2, training=True)
    assert wide is routing
    assert none == 0
