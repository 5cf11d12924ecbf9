"""torch.compile takes the layer whole, and computes and counts what eager mode does."""

import copy

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.moe import routers
from sparsight.moe.gates import drawn_weight, traced_weight

WHOLE = {
    "top-2, two losses": {"k": 2, "balance": (sp.SwitchLoss(over="sequence"), sp.ZLoss())},
    "sigmoid and bias": {
        "router": routers.sigmoid(),
        "k": 2,
        "estimator": sp.GatingOnly(normalise=True),
        "balance": (sp.LossFreeBias(0.01), sp.SwitchLoss(over="global")),
    },
    "cosine, shared": {"router": routers.cosine(), "shared": 1},
    "sparsemixer": {"estimator": sp.SparseMixer(), "balance": sp.SwitchLoss()},
    "sparsemixer2": {"estimator": sp.SparseMixer2(), "k": 2},
    "sparsemixer2*": {"estimator": sp.SparseMixer2Star(), "k": 2},
    "capacity": {"capacity": 0.8, "k": 2, "balance": sp.SwitchLoss()},
    "capacity by probability": {"capacity": sp.Capacity(0.7, drop="prob")},
    "jitter, biased mlp": {
        "router": routers.softmax(jitter=0.1),
        "expert": lambda dim, hidden: sp.MLP(dim, hidden, bias=True),
    },
    "expert choice": {"router": routers.expert_choice(), "causal": False, "k": 2},
    "densemixer": {"estimator": sp.DenseMixer()},
}
APART = {
    "relu": {"router": routers.relu()},
    "gshard": {"router": routers.gshard(), "k": 2},
    "base": {"router": routers.base()},
    "default moe": {"estimator": sp.DefaultMoE()},
    "other experts": {"expert": lambda d, h: nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, d))},
}


def model_of(parts):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), sp.MoE(8, 16, experts=4, **{"expert": "glu", **parts}), nn.Linear(8, 8)
    )


def train(model, run, steps=3):
    """Losses, dropped and loads of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sp.follow_steps(model, optimizer)
    torch.manual_seed(1)
    seen = []
    for i in range(steps):
        x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(i))
        loss = run(x).square().mean() + sp.balance_loss(model)
        optimizer.zero_grad()
        loss.backward()
        seen.append((loss.detach(), model[1].dropped, model[1].routing.load(), model[1].ledger.load.clone()))
        optimizer.step()
    return seen


def same(a, b):
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one[0], other[0])
        assert one[1] == other[1]
        assert torch.equal(one[2], other[2])
        assert torch.equal(one[3], other[3])


@pytest.mark.parametrize("kind", WHOLE)
def test_one_graph_equals_eager(kind):
    torch._dynamo.reset()
    eager = model_of(WHOLE[kind])
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    same(train(eager, eager), train(other, compiled))
    for (name, a), b in zip(eager.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


# torch's own remark on tensors that cross from one graph to the next
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", APART)
def test_what_depends_on_the_data_runs_between_graphs_and_says_why(kind):
    torch._dynamo.reset()
    eager = model_of(APART[kind])
    other = copy.deepcopy(eager)
    same(train(eager, eager, 2), train(other, torch.compile(other, backend="aot_eager"), 2))
    torch._dynamo.reset()
    whole = torch.compile(other, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="depend on the data"):
        whole(torch.randn(2, 12, 8))


def test_idle_experts_get_zeros_and_nan_is_named():
    torch._dynamo.reset()
    moe = sp.MoE(8, 16, experts=4, name="here")
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([[1.0], [0.0], [0.0], [0.0]]).expand(4, 8))
    run = torch.compile(moe, backend="aot_eager", fullgraph=True)
    run(torch.rand(6, 8)).sum().backward()
    assert moe.experts[0].up.weight.grad.any()
    assert not moe.experts[1].up.weight.grad.any()
    before = moe.ledger.load.clone()
    with pytest.raises(ValueError, match=r"MoE 'here': .* 6 of 6 tokens are NaN"):
        run(torch.full((6, 8), torch.nan))
    assert torch.equal(moe.ledger.load, before)


def test_autocast_in_a_graph():
    torch._dynamo.reset()
    moe = sp.MoE(8, 16, experts=4, expert="glu").eval()
    run = torch.compile(moe, backend="aot_eager", fullgraph=True)
    x = torch.randn(12, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(x), moe(x))
    assert moe.routing.logit.dtype == torch.float32


def test_the_traced_weight_is_the_drawn_weight():
    torch.manual_seed(0)
    z = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    plain = z.detach()
    p = plain.masked_fill(plain < plain.amax(-1, keepdim=True) - 1, -torch.inf).softmax(-1)
    chosen, scale = p.argmax(-1, keepdim=True), torch.rand(6, 1, dtype=torch.float64)
    seed = torch.randn(6, 1, dtype=torch.float64)
    made = []
    for weigh in (drawn_weight, traced_weight):
        w = weigh(z, p, chosen, scale, 2.0)
        made.append((w.detach(), *torch.autograd.grad(w, z, seed)))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=1e-15)
