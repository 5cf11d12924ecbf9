"""Every number of routed layers, of topologies and of learning, against plain NumPy on what a hook caught."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.dynamics import samples
from tests.dynamics.common import batches, entropy, recorded, softmax

E, DIM, T = 5, 8, 24


@pytest.fixture
def every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow all weights instead of a sample, so that numbers can be compared exactly."""
    monkeypatch.setattr(samples, "AT_LEAST", 10**6)


# -- routed layers ---------------------------------------------------------------------------------


def routed_run(tmp_path: Path, steps: int, every: int, **options: object):
    """Train a little; return the history and, for each step, logits [T, E] and losses [T]."""
    torch.manual_seed(0)
    model = sp.MoE(DIM, 16, experts=E, **options)
    with torch.no_grad():
        model.router.weight.mul_(3)
        model.router.weight[4] = -model.router.weight[:4].sum(0)  # a seldom one
    caught: list[np.ndarray] = []
    model.router.register_forward_hook(lambda m, a, out: caught.append(out.detach().double().numpy().copy()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told = []
    with sp.watch(model, optimizer, tmp_path / "run", every=every) as watch:
        for x in batches(steps, T, DIM):
            optimizer.zero_grad()
            losses = (model(x) - 1).square().mean(-1)
            told.append(losses.detach().double().numpy())
            watch.losses(losses)
            losses.mean().backward()
            optimizer.step()
        history = recorded(watch)
    return history, caught, told


def test_load_and_gates_of_an_moe(tmp_path: Path):
    steps, every, k = 6, 3, 2
    history, logits, losses = routed_run(tmp_path, steps, every, k=k, capacity=1.0)

    def read(name: str) -> np.ndarray:
        return history.get(f"moe/{name}", "model").values

    idle = np.zeros(E)
    for reading in range(steps // every):
        span = range(reading * every, (reading + 1) * every)
        loads = np.array([np.bincount(np.argsort(-logits[s], 1)[:, :k].ravel(), minlength=E) for s in span])
        load = loads.sum(0)
        f = load / load.sum()
        limit = int(np.ceil(T * k / E))
        assert read("tokens_per_expert")[reading].tolist() == load.tolist()
        np.testing.assert_allclose(read("load_entropy")[reading], entropy(f) / np.log(E), rtol=1e-6)
        np.testing.assert_allclose(read("effective_experts")[reading], np.exp(entropy(f)), rtol=1e-6)
        np.testing.assert_allclose(read("load_cv")[reading], load.std() / load.mean(), rtol=1e-6)
        np.testing.assert_allclose(read("max_vio")[reading], load.max() / load.mean() - 1, rtol=1e-6)
        np.testing.assert_allclose(read("update_freq")[reading], (loads > 0).mean(0), rtol=1e-6)
        over = np.maximum(loads - limit, 0).sum()
        np.testing.assert_allclose(read("drop_rate")[reading], over / load.sum(), rtol=1e-6)
        assert over > 0
        for one in loads:
            idle = np.where(one > 0, 0, idle + 1)
        assert read("idle_steps")[reading].tolist() == idle.tolist()
        # The router's mind is read at the last step of the interval.
        last = span[-1]
        p = softmax(logits[last])
        np.testing.assert_allclose(read("router_entropy")[reading], entropy(p).mean() / np.log(E), rtol=1e-5)
        mutual = entropy(p.mean(0)) - entropy(p).mean()
        np.testing.assert_allclose(read("routing_mi")[reading], mutual, rtol=1e-4)
        np.testing.assert_allclose(read("gate_top1_prob")[reading], p.max(1).mean(), rtol=1e-5)
        np.testing.assert_allclose(read("gate_saturation")[reading], (p.max(1) > 0.99).mean(), rtol=1e-6)
        z = np.log(np.exp(logits[last]).sum(1))
        np.testing.assert_allclose(read("z_loss")[reading], (z**2).mean(), rtol=1e-5)
        np.testing.assert_allclose(read("load_balancing_loss")[reading], E * (f * p.mean(0)).sum(), rtol=1e-5)
        top = np.argsort(-logits[last], 1)[:, :k]
        served = [losses[last][(top == e).any(1)].mean() for e in range(E)]
        np.testing.assert_allclose(read("expert_loss")[reading], served, rtol=1e-5)


def test_saturation_and_death_are_seen(tmp_path: Path):
    torch.manual_seed(0)
    model = sp.MoE(DIM, 16, experts=E)
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.weight[2] = 50.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sp.watch(model, optimizer, tmp_path / "run", every=50) as watch:
        for _ in range(150):
            model(torch.ones(4, DIM)).square().mean().backward()
            optimizer.step()
        history = recorded(watch)
    assert history.get("moe/gate_saturation", "model").last == 1
    assert history.get("moe/dead_expert_frac", "model").values.tolist() == [0, 0.8, 0.8]
    assert history.get("moe/idle_steps", "model").last.tolist() == [150, 150, 0, 150, 150]
    assert history.get("moe/effective_experts", "model").last == pytest.approx(1)


def test_singletons_of_sparsemixer(tmp_path: Path):
    """A token is alone where every other logit falls short of the best by more than the mask's margin."""
    torch.manual_seed(0)
    model = sp.MoE(DIM, 16, experts=E, estimator=sp.SparseMixer())
    with torch.no_grad():
        model.router.weight.mul_(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        model(batches(1, 64, DIM)[0]).square().mean().backward()
        z = model.routing.logit.double().numpy()
        optimizer.step()
        share = recorded(watch).get("moe/singleton_frac", "model").last
    best = z.max(1, keepdims=True)
    masked = best - z > 0.1 * (np.abs(best) + np.abs(z))
    assert 0 < share < 1
    assert share == pytest.approx((masked.sum(1) == E - 1).mean())


def test_tokens_around_blocks(tmp_path: Path):
    torch.manual_seed(0)
    model = sp.MixtureOfDepths(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)), capacity=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = batches(1, 2, 8, DIM)[0]
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 4:] = False
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        model(x, mask=mask).square().mean().backward()
        norm = model.router.weight.grad.norm().item()
        logit = (x @ model.router.weight.detach().T)[mask].double().numpy()
        gate = 1 / (1 + np.exp(-logit))
        optimizer.step()
        history = recorded(watch)
    assert history.get("depth/taken", "model").last == pytest.approx(4 / 12)  # two of each sequence
    assert history.get("depth/gate_mean", "model").last == pytest.approx(gate.mean(), rel=1e-5)
    assert history.get("depth/router_grad_norm", "model").last == pytest.approx(norm, rel=1e-5)


# -- topologies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["masked", "compressed"])
def test_topologies_by_brute_force_on_masks(tmp_path: Path, every_weight: None, storage: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = sp.rigl(steps=80, every=4, fraction=0.3, end=1.0)
    sparse = sp.sparsify(model, optimizer, density=0.12, method=method, storage=storage)
    layer = sparse.layers["0"]

    def mask() -> np.ndarray:
        flat = np.zeros(800, bool)
        flat[layer.topology.positions().numpy()] = True
        return flat

    def dense(values: torch.Tensor) -> np.ndarray:
        flat = np.zeros(800)
        flat[layer.topology.positions().numpy()] = values.double().numpy()
        return flat

    masks, weights = [mask()], [dense(layer.weight.values())]
    grads: dict[int, np.ndarray] = {}
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        for step, x in enumerate(batches(40, 16, 20), 1):
            optimizer.zero_grad()
            (model(x) - x[:, :6].sin()).square().mean().backward()
            optimizer.step()
            if (grad := layer.weight.grad()) is not None:
                grads[step] = dense(grad)
            masks.append(mask())
            weights.append(dense(layer.weight.values()))
        history = recorded(watch)

    def read(name: str) -> dict[int, np.ndarray]:
        series = history.get(f"sparse/{name}", "0")
        return dict(zip(series.steps.tolist(), series.values, strict=True))

    updates = [s for s in range(1, 41) if (masks[s] != masks[s - 1]).any()]
    assert len(updates) >= 8
    ever = masks[0].copy()
    grown: list[np.ndarray] = []
    for step in range(1, 41):
        before, after = masks[step - 1], masks[step]
        ever |= after
        assert read("density")[step] == pytest.approx(after.mean())
        assert read("itop_rate")[step] == pytest.approx(ever.mean())
        if step not in updates:
            assert step == 1 or step not in read("churn")
            continue
        new, gone, kept = after & ~before, before & ~after, after & before
        grown.insert(0, new)
        assert read("churn")[step] == pytest.approx(new.sum() / after.sum())
        assert read("overlap")[step] == pytest.approx((after & masks[0]).sum() / masks[0].sum())
        grid = after.reshape(40, 20)
        assert read("dead_neurons")[step] == pytest.approx((~grid.any(1)).mean())
        assert read("dead_inputs")[step] == pytest.approx((~grid.any(0)).mean())
        size = np.abs(weights[step - 1])
        margin = size[gone].mean() / size[kept].mean()
        assert read("drop_margin")[step] == pytest.approx(margin, rel=1e-5)
        # 40 rows in a grid of 32: some cells are two rows high.
        cells = np.zeros((32, 20))
        high = np.zeros((32, 20))
        for row in range(40):
            cells[row * 32 // 40] += grid[row]
            high[row * 32 // 40] += 1
        np.testing.assert_allclose(read("topology_map")[step].reshape(32, 20), cells / high, rtol=1e-6)
        if len(grown) > 1:
            lives = [(after & old).sum() / old.sum() for old in grown[1:6]]
            told = read("survival")[step]
            np.testing.assert_allclose(told[~np.isnan(told)], lives, rtol=1e-6)
        seen = next((s for s in range(step, 41) if s in grads and (masks[s] == after).all()), None)
        if seen is not None and step != updates[-1]:
            g = np.abs(grads[seen])
            ratio = g[new].mean() / g[after & ~new].mean()
            assert read("grad_ratio")[seen] == pytest.approx(ratio, rel=1e-4)
    assert history.get("sparse/survival", "0").values.shape[1] == 5
    assert (
        history.get("sparse/updates").last == len(updates)
        or sparse.updates == history.get("sparse/updates").last
    )
    whole = sum(part.topology.nnz for part in sparse.layers.values()) / (800 + 240)
    assert history.get("sparse/density").last == pytest.approx(whole)


# -- learning --------------------------------------------------------------------------------------


def test_norms_rates_and_signal_of_experts_and_layers(tmp_path: Path, every_weight: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), sp.MoE(DIM, 6, experts=3), nn.Linear(DIM, DIM))
    slow, fast = [*model[0].parameters(), *model[1].parameters()], [*model[2].parameters()]
    optimizer = torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": fast, "lr": 0.5}], momentum=0.9)

    def flat(params) -> np.ndarray:
        return np.concatenate([p.detach().double().reshape(-1).numpy() for p in params])

    def grad(params) -> np.ndarray:
        return np.concatenate(
            [(torch.zeros_like(p) if p.grad is None else p.grad).double().reshape(-1).numpy() for p in params]
        )

    experts = [list(expert.parameters()) for expert in model[1].experts]
    layers = {"0": (list(model[0].parameters()), 0.01), "2": (list(model[2].parameters()), 0.5)}
    moments = [(0.0, 0.0, 0.0) for _ in experts]
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        for x in batches(6, 12, DIM):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before = [flat(ps) for ps in experts]
            layer_before = {name: flat(ps) for name, (ps, _) in layers.items()}
            grads = [grad(ps) for ps in experts]
            layer_grads = {name: grad(ps) for name, (ps, _) in layers.items()}
            present = [any(p.grad is not None for p in ps) for ps in experts]
            optimizer.step()
            history = recorded(watch)
            np.testing.assert_allclose(
                history.get("moe/grad_norm", "1").last, [np.linalg.norm(g) for g in grads], rtol=1e-5
            )
            moved = np.array([np.abs(flat(ps) - b).mean() for ps, b in zip(experts, before, strict=True)])
            np.testing.assert_allclose(
                history.get("moe/effective_lr", "1").last, moved / moved.mean(), rtol=1e-3
            )
            # Running means that keep nine tenths: of g, of g², and of how much has been seen.
            moments = [
                (0.9 * m + 0.1 * g, 0.9 * s + 0.1 * g**2, 0.9 * w + 0.1) if there else (m, s, w)
                for (m, s, w), g, there in zip(moments, grads, present, strict=True)
            ]
            unit = np.stack([flat(ps) for ps in experts])
            unit /= np.linalg.norm(unit, axis=1, keepdims=True)
            pairs = [unit[i] @ unit[j] for i in range(3) for j in range(i)]
            assert history.get("moe/similarity", "1").last == pytest.approx(np.mean(pairs), abs=1e-5)
            rates = {}
            for name, (ps, lr) in layers.items():
                assert history.get("dense/grad_norm", name).last == pytest.approx(
                    np.linalg.norm(layer_grads[name]), rel=1e-5
                )
                assert history.get("dense/weight_norm", name).last == pytest.approx(
                    np.linalg.norm(flat(ps)), rel=1e-5
                )
                rates[name] = np.abs(flat(ps) - layer_before[name]).mean() / lr
            mean = np.mean(list(rates.values()))
            for name, rate in rates.items():
                assert history.get("dense/effective_lr", name).last == pytest.approx(rate / mean, rel=1e-3)
    snr = [((m / w) ** 2).sum() / (s / w - (m / w) ** 2).clip(0).sum() for m, s, w in moments]
    np.testing.assert_allclose(history.get("moe/grad_snr", "1").last, snr, rtol=1e-3)


def test_how_often_a_weight_is_updated(tmp_path: Path, every_weight: None):
    """Inputs 0 and 1 of four take turns to be zero: their weights have a gradient at every other reading."""
    torch.manual_seed(0)
    model = nn.Linear(4, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sp.sparsify(model, optimizer, density=1.0, method=sp.static(), storage="masked", include=[""])
    kept = {0: 0.0, 1: 0.0}
    seen = 0.0
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        for step in range(60):
            x = torch.rand(8, 4) + 0.5
            x[:, step % 2] = 0
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            kept = {i: 0.9 * v + 0.1 * (step % 2 != i) for i, v in kept.items()}
            seen = 0.9 * seen + 0.1
        name = watch.sparsifier.layers and next(iter(watch.sparsifier.layers))
        bars = recorded(watch).get("sparse/update_freq", name).last
    expected = np.histogram([kept[0] / seen, kept[1] / seen, 1, 1], 10, (0, 1))[0] / 4
    np.testing.assert_allclose(bars, expected, atol=1e-6)
