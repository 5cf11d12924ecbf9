"""Real loops: optimizers, schedulers, accumulation, clipping, scaling, compiling, copying."""

import warnings

import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dst.common import assert_same

STEPS = 45
RIGL = {"steps": 40, "every": 10, "end": 1.0}


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))


def data(step: int, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 12, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].argmax(1)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = data(step)
    return nn.functional.cross_entropy(model(x), y)


class Stranger(torch.optim.Optimizer):
    """An optimizer no library has heard of: sign descent with two slots, a noisy step, one odd slot."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["calm"] = torch.zeros_like(p)
                    state["wild"] = torch.zeros_like(p)
                    state["row_sums"] = torch.zeros(p.shape[0])
                state["calm"].lerp_(p.grad, 0.3)
                state["wild"].mul_(0.5).add_(p.grad.abs())
                state["row_sums"] += p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad
                # Adds a little everywhere, as Langevin dynamics would: also where nothing exists.
                p.sub_(group["lr"] * (state["calm"].sign() + 0.01))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=5e-3),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=5e-3, foreach=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=5e-3, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=5e-3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=2e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=2e-2),
    "stranger": Stranger,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("method", ["rigl", "set"])
def test_any_optimizer(name, method):
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    chosen = sp.rigl(**RIGL) if method == "rigl" else sp.set_(every=10)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=chosen)
    budgets = {n: t.nnz for n, t in sparse.topologies.items()}
    begin = sum(loss_of(model, s).item() for s in range(5))
    for step in range(STEPS):
        before = sparse.topologies
        updates = sparse.updates
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        for n, layer in sparse.layers.items():
            param, mask = layer.weight.param, layer.topology.mask()
            assert layer.topology.nnz == budgets[n]
            assert not param[~mask].any()
            if sparse.updates > updates:
                grown = mask & ~before[n].mask()
                assert not param[grown].any()
                for slot in optimizer.state[param].values():
                    if isinstance(slot, torch.Tensor) and slot.shape == param.shape:
                        assert not slot[grown].any()
    assert sparse.updates >= 3
    assert sum(loss_of(model, s).item() for s in range(5)) < begin


def test_several_parameter_groups_and_a_weight_outside_the_optimizer():
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}],
        momentum=0.9,
    )
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
    last = sparse.topologies["4"]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert sparse.topologies["4"].same_as(last), "a weight that no optimizer moves was rewired"
    assert sparse.updates >= 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_lr_schedulers_built_before_or_after(when):
    """A replaced `step` would make torch warn, and warnings are errors here."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.1)
    sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.1)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def accumulated(micro: int, set_to_none: bool, method: sp.Method) -> sp.Sparsifier:
    """Float64, so that the sum over micro-batches is the whole batch's gradient but for rounding."""
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=method)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        for xs, ys in zip(x.double().chunk(micro), y.chunk(micro), strict=True):
            (nn.functional.cross_entropy(model(xs), ys) / micro).backward()
        optimizer.step()
    return sparse


@pytest.mark.parametrize("method", ["rigl", "snfs"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation_is_one_step(method, set_to_none):
    make = {"rigl": lambda: sp.rigl(**RIGL), "snfs": lambda: sp.snfs(steps=40, every=10)}[method]
    whole, parts = accumulated(1, True, make()), accumulated(4, set_to_none, make())
    assert parts.updates == whole.updates >= 3
    assert parts.step == whole.step == STEPS
    for name, topology in whole.topologies.items():
        assert topology.same_as(parts.topologies[name])
        torch.testing.assert_close(
            whole.layers[name].weight.param, parts.layers[name].weight.param, rtol=1e-9, atol=1e-12
        )


def test_clipping_does_not_count_missing_weights_even_on_a_due_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparse = sp.sparsify(model, optimizer, density=0.2, method=sp.rigl(**RIGL))
    for step in range(21):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        # The norm by hand: a dense twin's gradient at the existing weights and all biases.
        twin = mlp()
        twin.load_state_dict(model.state_dict())
        loss_of(twin, step).backward()
        square = 0.0
        for (name, _), own in zip(model.named_parameters(), twin.parameters(), strict=True):
            grad = own.grad
            if name.endswith("weight"):
                grad = grad[sparse.topologies[name.removesuffix(".weight")].mask()]
            square += float(grad.square().sum())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert float(norm) == pytest.approx(square**0.5, rel=1e-4)
        optimizer.step()
    assert sparse.updates == 2


def test_the_dense_gradient_is_the_one_the_optimizer_would_have_used():
    """After clipping: RigL's view of it is the clipped dense gradient, to float precision."""
    seen = {}

    def spy(view: sp.LayerView) -> torch.Tensor:
        seen[view.name] = view.dense_grad.clone()
        return view.dense_grad.abs()

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = sp.Method(
        "spy", grow=spy, fraction=sp.constant(0.3), due=sp.every(1), replaces_step=True, gradient="due"
    )
    sp.sparsify(model, optimizer, density=0.3, method=method)
    for step in range(2):
        twin = mlp()
        twin.load_state_dict(model.state_dict())
        loss_of(twin, step).backward()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    dense = twin[0].weight.grad.flatten() * (0.05 / (norm + 1e-6))
    torch.testing.assert_close(seen["0"], dense, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_skips_a_step(fused):
    """An overflow at a due step: nothing moves, nothing is counted, and the update comes with the next."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=fused)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    clean = mlp()
    other = torch.optim.AdamW(clean.parameters(), lr=5e-3, fused=fused)
    plain = sp.sparsify(clean, other, density=0.3, method=sp.rigl(**RIGL))
    for step in range(30):
        if step in (10, 17):  # step 10 is due
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step) * float("inf")).backward()
            before = {k: v.clone() for k, v in model.state_dict().items()}
            scaler.step(optimizer)
            scaler.update()
            assert_same(model.state_dict(), before)
            assert sparse.step == step
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        loss_of(clean, step).backward()
        other.step()
    assert sparse.updates == plain.updates == 2
    for name, topology in plain.topologies.items():
        assert topology.same_as(sparse.topologies[name])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_was_thrown_away_is_not_used(set_to_none):
    """Backward, then zero_grad without a step: the next due update sees the last gradient alone."""
    runs = []
    for waste in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
        for step in range(12):
            optimizer.zero_grad(set_to_none=set_to_none)
            if waste:
                (100 * loss_of(model, step + 500)).backward()
                optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step).backward()
            optimizer.step()
        runs.append(sparse)
    for name, topology in runs[0].topologies.items():
        assert topology.same_as(runs[1].topologies[name])


def test_a_closure():
    """`optimizer.step(closure)` computes gradients inside the step; the result is the plain loop's."""
    runs = []
    for closed in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
        for step in range(STEPS):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            if closed and step % 2:
                optimizer.step(closure)
            elif closed:
                optimizer.step(closure=closure)
            else:
                closure()
                optimizer.step()
        runs.append((model, sparse))
    assert runs[0][1].updates == runs[1][1].updates >= 3
    assert_same(runs[0][0].state_dict(), runs[1][0].state_dict())


def test_torch_compile():
    torch.manual_seed(0)
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about this machine
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.Adam(compiled.parameters(), lr=5e-3)
        sparse = sp.sparsify(compiled, optimizer, density=0.3, method=sp.rigl(**RIGL))
        assert list(sparse.layers) == ["0", "2", "4"]
        plain = mlp()
        other = torch.optim.Adam(plain.parameters(), lr=5e-3)
        eager = sp.sparsify(plain, other, density=0.3, method=sp.rigl(**RIGL))
        for step in range(STEPS):
            for net, opt in ((compiled, optimizer), (plain, other)):
                opt.zero_grad()
                loss_of(net, step).backward()
                opt.step()
    assert sparse.updates == eager.updates >= 3
    for name, topology in eager.topologies.items():
        assert topology.same_as(sparse.topologies[name])
        assert not sparse.layers[name].weight.param[~topology.mask()].any()
