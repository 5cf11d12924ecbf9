"""The layer in a training run: recomputation, resuming, compiling, autocast, padding, sparse experts."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparsight as sp
from sparsight.moe import routers
from sparsight.moe.stretch import stretch

STATEFUL = {
    "bias": {"balance": (sp.LossFreeBias(0.01), sp.SwitchLoss(over="global"))},
    "relu": {"router": routers.relu(first=1e-3), "k": 2},
    "default moe": {"estimator": sp.DefaultMoE()},
    "sparsemixer": {"estimator": sp.SparseMixer(), "balance": sp.SwitchLoss()},
    "reinforce": {"estimator": sp.Reinforce()},
    "jitter": {"router": routers.softmax(jitter=0.2), "k": 2, "capacity": 1.0},
}


def model_of(kind, **more):
    torch.manual_seed(0)
    moe = sp.MoE(8, 16, experts=4, **{"expert": "glu", **STATEFUL[kind], **more})
    return nn.Sequential(nn.Linear(8, 8), moe, nn.Linear(8, 8))


def batches(count):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, 12, 8, generator=g) for _ in range(count)]


def step(model, optimizer, x, run=None):
    optimizer.zero_grad()
    loss = (model(x) if run is None else run(x)).square().mean()
    total = loss + sp.balance_loss(model)
    if isinstance(model[1].estimator, sp.Reinforce):
        total = total + sp.reinforce_loss(model, loss)
    total.backward()
    optimizer.step()


def same_state(a, b):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y) or (x.isnan().all() and y.isnan().all()), name


@pytest.mark.parametrize("kind", STATEFUL)
def test_recomputation_counts_nothing_twice_and_redraws_nothing(kind):
    runs = []
    for again in (False, True):
        model = model_of(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sp.follow_steps(model, optimizer)
        run = (lambda x, m=model: checkpoint(m, x, use_reentrant=False)) if again else None
        torch.manual_seed(1)
        loads = []
        for x in batches(3):
            step(model, optimizer, x, run)
            loads.append(model[1].routing.load())
        runs.append((model, torch.stack(loads)))
    assert torch.equal(runs[0][1], runs[1][1])
    same_state(runs[0][0], runs[1][0])


def test_reentrant_checkpoint_loses_the_balance_loss_and_says_so():
    model = model_of("sparsemixer")
    x = torch.randn(2, 12, 8, requires_grad=True)
    checkpoint(model, x, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        sp.balance_loss(model)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_resumed_run_is_bit_identical(kind, tmp_path):
    data = batches(6)

    def start():
        model = model_of(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sp.follow_steps(model, optimizer)
        return model, optimizer

    torch.manual_seed(1)
    whole, optimizer = start()
    torch.manual_seed(1)
    for i, x in enumerate(data):
        if i == 3:
            saved = {"m": whole.state_dict(), "o": optimizer.state_dict(), "r": torch.get_rng_state()}
            torch.save(saved, tmp_path / "run.pt")
        step(whole, optimizer, x)
    again, optimizer = start()
    saved = torch.load(tmp_path / "run.pt")
    again.load_state_dict(saved["m"])
    optimizer.load_state_dict(saved["o"])
    torch.set_rng_state(saved["r"])
    for x in data[3:]:
        step(again, optimizer, x)
    same_state(whole, again)


def test_autocast_keeps_the_router_in_float32():
    model = model_of("sparsemixer")
    x = torch.randn(2, 12, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        (y.float().square().mean() + sp.balance_loss(model)).backward()
    assert y.dtype == torch.bfloat16
    routing = model[1].routing
    assert routing.logit.dtype == routing.prob.dtype == routing.weight.dtype == torch.float32
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    low = sp.MoE(8, 16, experts=4).to(torch.bfloat16)
    assert low(x.to(torch.bfloat16)).dtype == torch.bfloat16
    assert low.routing.logit.dtype == torch.float32


def test_biases_stay_float32_in_a_bfloat16_model():
    moe = sp.MoE(8, 16, experts=4, balance=sp.LossFreeBias(1e-3)).to(torch.bfloat16)
    assert moe.ledger.bias().dtype == torch.float32
    for _ in range(3):
        moe(torch.randn(16, 8, dtype=torch.bfloat16)).float().sum().backward()
        moe.after_step()
    steps = moe.ledger.bias() / 1e-3
    torch.testing.assert_close(steps, steps.round())


def test_bfloat16_experts_are_close_to_float32():
    torch.manual_seed(0)
    moe = sp.MoE(32, 64, experts=4, k=2, expert="glu")
    x = torch.randn(64, 32, requires_grad=True)
    y = moe(x)
    (exact,) = torch.autograd.grad(y.square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = moe(x)
    (grad,) = torch.autograd.grad(rough.float().square().sum(), x)
    torch.testing.assert_close(rough.float(), y, rtol=0.05, atol=0.02)
    assert (grad - exact).norm() / exact.norm() < 0.03


def test_padding_is_neither_routed_nor_counted():
    torch.manual_seed(0)
    moe = sp.MoE(8, 16, experts=4, k=2, balance=(sp.SwitchLoss(1.0), sp.ZLoss(1.0)), shared=1)
    x = torch.randn(2, 6, 8)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    y = moe(x, mask=mask)
    padded = sp.balance_loss(moe)
    assert not y[~mask].any()
    assert int(moe.ledger.load.sum()) == 2 * 9
    moe.after_step()
    torch.testing.assert_close(moe(x[mask]), y[mask])
    torch.testing.assert_close(sp.balance_loss(moe), padded)
    assert not moe(x, mask=torch.zeros_like(mask)).any()
    with pytest.raises(ValueError, match=r"mask must have the shape \(2, 6\)"):
        moe(x, mask=mask[0])


def test_any_leading_shape_and_empty_batches():
    moe = sp.MoE(8, 16, experts=4)
    assert moe(torch.randn(8)).shape == (8,)
    assert moe(torch.randn(2, 3, 4, 8)).shape == (2, 3, 4, 8)
    assert moe(torch.randn(0, 8)).shape == (0, 8)


def test_shared_experts_see_every_token_and_dropped_tokens_pass_by():
    torch.manual_seed(0)
    moe = sp.MoE(8, 16, experts=4, capacity=sp.Capacity(0.5), name="here")
    x = torch.randn(64, 8)
    y = moe(x)
    silent = ~y.any(1)
    assert moe.dropped == int(silent.sum()) > 0
    assert moe.routing.token.numel() == 64  # what was decided, before anything was dropped
    assert sp.MoE(8, 16, experts=4, shared=2).shared.up.weight.shape == (32, 8)


def test_sparsify_works_inside_and_leaves_the_router_dense():
    torch.manual_seed(0)
    model = nn.Sequential(sp.MoE(16, 32, experts=4, k=2, expert="glu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sparse = sp.sparsify(model, optimizer, density=0.25, method=sp.rigl(steps=40, every=4))
    assert set(sparse.layers) == {f"0.experts.{e}.{m}" for e in range(4) for m in ("gate_up", "down")}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x = torch.randn(64, 16)
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    assert sparse.density == pytest.approx(0.25, abs=0.01)
    moved = sum(
        int(((p != 0) != (before[n] != 0)).sum()) for n, p in model.named_parameters() if "experts" in n
    )
    assert moved > 0
    assert (model[0].router.weight != 0).all()


def test_experts_of_any_module():
    torch.manual_seed(0)

    def factory(dim, hidden):
        return nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))

    moe = sp.MoE(8, 16, experts=4, k=2, expert=factory, estimator=sp.SparseMixer())
    moe(torch.randn(32, 8)).sum().backward()
    assert moe.router.weight.grad.any()
    hooked = sp.MoE(8, 16, experts=2, expert="glu")
    seen = []
    hooked.experts[0].gate_up.register_forward_hook(lambda *_: seen.append(1))
    hooked(torch.randn(32, 8))
    assert seen  # a hook on an expert's layer is not passed over


def test_a_layer_can_be_copied_and_saved_in_the_middle_of_a_step(tmp_path):
    model = model_of("sparsemixer")
    x = torch.randn(2, 12, 8)
    model(x)
    twin = copy.deepcopy(model)
    torch.save(model[1].state_dict(), tmp_path / "moe.pt")
    model.eval()
    twin.eval()
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "cosine", "base", "sinkhorn", "relu", "hashed"])
def test_a_whole_layer_can_be_pickled(router):
    moe = sp.MoE(8, 16, experts=4, router=getattr(routers, router)())
    twin = pickle.loads(pickle.dumps(moe)).eval()
    x, ids = torch.randn(6, 8), torch.arange(6)
    assert torch.equal(twin(x, ids=ids), moe.eval()(x, ids=ids))


def test_omega_scales_the_output_and_learns():
    y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    omega = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, omega: stretch(y, omega, sp.Pool()), (y, omega))
    moe = sp.MoE(8, 16, experts=4, estimator=sp.SparseMixer())
    assert torch.equal(moe.omega, torch.ones(8))
    moe(torch.randn(6, 8)).square().sum().backward()
    assert moe.omega.grad.any()


def test_default_moe_learns_means_once_a_step():
    torch.manual_seed(0)
    moe = sp.MoE(8, 16, experts=4, estimator=sp.DefaultMoE(decay=0.5))
    x = torch.randn(64, 8)
    moe(x)
    assert not moe.ledger.defaults.any()
    chosen = moe.routing.expert
    moe.after_step()
    for e in range(4):
        torch.testing.assert_close(moe.ledger.defaults[e], moe.experts[e](x[chosen == e]).mean(0).detach())
    moe(x)
    held = moe.ledger.defaults.clone()
    moe.after_step()
    torch.testing.assert_close(moe.ledger.defaults, held)  # the same outputs, the same means
    moe(x).sum().backward()
    assert moe.router.weight.grad.any()


def test_densemixer_gives_the_router_the_dense_gradient_and_idle_experts_none():
    torch.manual_seed(0)
    moe = sp.MoE(4, 8, experts=3, estimator=sp.DenseMixer()).double()
    x = torch.randn(10, 4, dtype=torch.float64)
    seed = torch.randn(10, 4, dtype=torch.float64)
    y = moe(x)
    y.backward(seed)
    p = moe.router(x).softmax(1).detach().requires_grad_()
    outs = torch.stack([expert(x) for expert in moe.experts], 1).detach()
    chosen = nn.functional.one_hot(p.argmax(1), 3)
    torch.testing.assert_close(y.detach(), ((p * chosen)[..., None] * outs).sum(1).detach())
    (p[..., None] * outs).sum(1).backward(seed)
    z = moe.router(x)
    (expected,) = torch.autograd.grad(z.softmax(1), moe.router.weight, p.grad)
    torch.testing.assert_close(moe.router.weight.grad, expected)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"estimator": "sparsemixer"}, "estimator must be one such as sp.SparseMixer"),
        ({"estimator": sp.SparseMixer}, "estimator must be one such as sp.SparseMixer"),
        ({"router": "softmax"}, "router must be one such as sp.routers.softmax"),
        ({"balance": sp.SwitchLoss}, "balance must hold balancers such as sp.SwitchLoss"),
        ({"balance": [0.01]}, "balance must hold balancers such as sp.SwitchLoss"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused_when_the_layer_is_built(parts, message):
    with pytest.raises(ValueError, match=message):
        sp.MoE(8, 16, experts=4, **parts)


def test_steps_are_followed_once_and_by_the_right_optimizer():
    moe = sp.MoE(8, 16, experts=4, balance=sp.LossFreeBias(0.1))
    with pytest.raises(ValueError, match="holds none of the parameters"):
        sp.follow_steps(moe, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0))
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    following = sp.follow_steps(moe, optimizer)
    with pytest.raises(ValueError, match="followed already"):
        sp.follow_steps(moe, optimizer)
    following.remove()
    sp.follow_steps(moe, optimizer)
