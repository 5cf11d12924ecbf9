"""Any loop, watched: what counts as a step, what is counted at all, and what a watch must not change."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparsight as sp
from tests.dynamics.common import batches, recorded, train

E, DIM = 4, 8


def moe(**options: object) -> sp.MoE:
    torch.manual_seed(0)
    return sp.MoE(DIM, 16, experts=E, **{"k": 1, **options})


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def load(watch: sp.Watch, name: str = "model") -> np.ndarray:
    return recorded(watch).get("moe/tokens_per_expert", name).values


# -- what is a step --------------------------------------------------------------------------------


def test_gradient_accumulation_is_one_step(tmp_path: Path):
    model = moe()
    optimizer = sgd(model)
    with sp.watch(model, optimizer, tmp_path / "run", every=2) as watch:
        for _ in range(4):
            for x in batches(3, 5, DIM):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watch.step == 4
        assert load(watch).sum(1).tolist() == [30, 30]
        history = recorded(watch)
    assert history.get("moe/update_freq", "model").last.max() <= 1


def test_a_checkpointed_pass_counts_once(tmp_path: Path):
    seen = []
    for again in (False, True):
        model = nn.Sequential(nn.Identity(), moe(estimator=sp.SparseMixer()))
        optimizer = sgd(model)
        torch.manual_seed(1)
        with sp.watch(model, optimizer, tmp_path / str(again), every=1) as watch:
            x = batches(1, 32, DIM)[0]
            y = checkpoint(model, x, use_reentrant=False) if again else model(x)
            y.square().mean().backward()
            optimizer.step()
            seen.append(load(watch, "1")[0])
    assert seen[1].sum() == 32
    assert np.array_equal(*seen)


def test_padding_is_not_counted(tmp_path: Path):
    model = moe()
    optimizer = sgd(model)
    x = batches(1, 2, 6, DIM)[0]
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 2:] = False
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        model(x, mask=mask).square().mean().backward()
        per_token = torch.arange(12.0).reshape(2, 6)
        watch.losses(per_token)
        expert = model.routing.expert
        optimizer.step()
        history = recorded(watch)
    assert history.get("moe/tokens_per_expert", "model").last.sum() == 8
    served = [per_token[mask][expert == e].mean().item() for e in range(E)]
    np.testing.assert_allclose(history.get("moe/expert_loss", "model").last, served)


def test_steps_that_the_gradient_scaler_skips_are_not_counted(tmp_path: Path):
    model = moe()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        for bad in (False, True, False):
            optimizer.zero_grad()
            scaler.scale(model(batches(1, 8, DIM)[0]).square().mean()).backward()
            if bad:
                model.router.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        assert watch.step == 2
        history = recorded(watch)
    # The tokens of the step that was skipped are seen with the next one, as in accumulation.
    assert history.get("moe/tokens_per_expert", "model").values.sum(1).tolist() == [8, 16]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_scaled_gradients_are_shown_unscaled_under_a_fused_optimizer(tmp_path: Path, kind: type):
    norms = []
    for scale in (1.0, 1024.0):
        model = moe()
        optimizer = kind(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with sp.watch(model, optimizer, tmp_path / str(scale), every=1) as watch:
            scaler.scale(model(batches(1, 8, DIM)[0]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            norms.append(recorded(watch).get("moe/grad_norm", "model").last)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


def test_a_closure_that_runs_many_times_is_one_step(tmp_path: Path):
    model = moe()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, calls = batches(1, 8, DIM)[0], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(x) - 1).square().mean()
        value.backward()
        calls.append(1)
        return value

    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        optimizer.step(closure)
        optimizer.step(closure)
        assert watch.step == 2
        assert load(watch).sum() == 8 * len(calls)


def test_autocast_is_watched_outputs_and_all(tmp_path: Path):
    model = nn.Sequential(nn.Linear(DIM, DIM), moe())
    optimizer = sgd(model)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = model(batches(1, 8, DIM)[0]).float().square().mean()
        value.backward()
        optimizer.step()
        assert len(recorded(watch).get("moe/output_similarity", "1")) == 1


@pytest.mark.parametrize("inner", [False, True], ids=["the model", "a layer"])
def test_a_compiled_model_is_counted_the_same(tmp_path: Path, inner: bool):
    seen = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), nn.Linear(DIM, E))
        adapter = sp.where_logits(lambda name, m: isinstance(m, nn.Linear), lambda m, out: out, k=2)
        if compiled and inner:
            model[1].compile(backend="eager")
        run = torch.compile(model, backend="eager") if compiled and not inner else model
        optimizer = sgd(model, 0.0)
        with sp.watch(run, optimizer, tmp_path / str(compiled), every=1, adapters=[adapter]) as watch:
            for x in batches(3, 10, DIM):
                run(x).square().mean().backward()
                optimizer.step()
            seen.append(load(watch, "1"))
    assert seen[1].sum(1).tolist() == [20, 20, 20]
    assert np.array_equal(*seen)


# -- what a watch must not change ------------------------------------------------------------------


class Noisy(nn.Module):
    """Sampled experts, dropout and a sparse layer: every source of chance there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 32)
        self.second = nn.Linear(32, DIM)
        self.drop = nn.Dropout(0.2)
        self.moe = sp.MoE(DIM, 16, experts=E, k=1, estimator=sp.SparseMixer(), balance=sp.SwitchLoss())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.drop(self.second(self.first(x).relu())))


def test_training_is_bit_identical_with_and_without_a_watch(tmp_path: Path):
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sp.sparsify(
            model, optimizer, density=0.3, include=["first", "second"], method=sp.rigl(steps=30, every=5)
        )
        data = batches(30, 16, DIM)
        if watched:
            with sp.watch(model, optimizer, tmp_path / "run", every=3) as watch:
                train(model, optimizer, data)
                assert recorded(watch).last_step == 30
        else:
            train(model, optimizer, data)
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        ends.append([*model.parameters(), *state, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_of_a_watched_model_works_and_is_not_watched(tmp_path: Path, how: str):
    model = nn.Sequential(moe(), nn.Linear(DIM, DIM))
    optimizer = sgd(model)
    x = batches(1, 8, DIM)[0]
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            torch.save(model, tmp_path / "model.pt")
            twin = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(twin(x), model.eval()(x)) or not torch.isnan(twin(x)).any()
        model.train()
        for _ in range(3):
            twin(x)
        model(x).square().mean().backward()
        optimizer.step()
        assert load(watch, "0").sum() == 8
        with sp.watch(twin, sgd(twin), tmp_path / "twin", every=1) as other:
            assert [route.name for route in other.routes] == ["0"]


def test_close_leaves_no_hook_behind(tmp_path: Path):
    model = nn.Sequential(moe())
    optimizer = sgd(model)
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    watch = sp.watch(model, optimizer, tmp_path / "run")
    watch.close()
    after = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert before == after
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    watch.close()  # once more does no harm
    train(model, optimizer, batches(1, 4, DIM))


# -- what it is told, and not told -----------------------------------------------------------------


def test_a_model_with_nothing_sparse_says_what_is_watched_instead(tmp_path: Path):
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    optimizer = sgd(model)
    with pytest.warns(UserWarning, match=r"nothing in this model is sparse.*watching 2 dense layers"):
        watch = sp.watch(model, optimizer, tmp_path / "run", every=1)
    with watch:
        train(model, optimizer, batches(2, 4, DIM))
        history = recorded(watch)
    assert history.places("dense/effective_lr") == ["0", "2"]
    assert history.get("dense/update_freq", "0").last == pytest.approx(1)


def test_hooks_that_the_user_removed_are_missed_once_and_nothing_is_made_up(tmp_path: Path):
    model = nn.Sequential(moe(), moe())
    optimizer = sgd(model)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        train(model, optimizer, batches(2, 4, DIM))
        model[0]._forward_hooks.clear()
        with pytest.warns(UserWarning, match="the hook on layer '0' was removed; its routing is no longer"):
            train(model, optimizer, batches(1, 4, DIM))
        train(model, optimizer, batches(120, 4, DIM))
        history = recorded(watch)
    assert history.get("moe/tokens_per_expert", "0").steps.tolist() == [1, 2]
    assert len(history.get("moe/tokens_per_expert", "1")) == 123


def test_an_optimizer_whose_hook_was_removed_is_missed_after_many_passes(tmp_path: Path):
    model = moe()
    optimizer = sgd(model)
    with sp.watch(model, optimizer, tmp_path / "run") as watch:
        optimizer._optimizer_step_post_hooks.clear()
        with pytest.warns(UserWarning, match="500 forward passes and no optimizer step"):
            train(model, optimizer, batches(500, 2, DIM))
        assert watch.step == 0


def test_a_layer_that_does_not_run_holds_nothing_against_its_experts(tmp_path: Path):
    model = nn.Sequential(moe(), nn.Linear(DIM, DIM))
    optimizer = sgd(model)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        train(model, optimizer, batches(1, 64, DIM))
        idle = recorded(watch).get("moe/idle_steps", "0").last
        train(model[1], optimizer, batches(150, 4, DIM))
        train(model, optimizer, batches(1, 64, DIM))
        history = recorded(watch)
    assert (history.get("moe/idle_steps", "0").last <= idle + 1).all()
    assert history.get("moe/dead_expert_frac", "0").last == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
        (torch.zeros(0), r"a tensor of shape \(0,\)"),
        (None, "None"),
        ("good", "'good'"),
        ([1, 2], r"\[1, 2\]"),
        (torch.zeros(1, dtype=torch.complex64) + 1j, "a tensor"),
    ],
)
def test_log_refuses_what_is_not_one_number(tmp_path: Path, value: object, said: str):
    model = moe()
    message = f"watch.log: accuracy must be one number, got {said}"
    with sp.watch(model, sgd(model), tmp_path / "run") as watch, pytest.raises(ValueError, match=message):
        watch.log(accuracy=value)


def test_log_takes_every_kind_of_number_nan_and_infinity_too(tmp_path: Path):
    model = moe()
    told = {
        "a": torch.tensor(0.5, requires_grad=True), "b": np.float32(0.5), "c": 1, "d": True,
        "e": torch.tensor([[2.0]]), "f": float("nan"), "g": torch.tensor(float("inf")),
    }  # fmt: skip
    with sp.watch(model, sgd(model), tmp_path / "run") as watch:
        watch.log(**told)
        history = recorded(watch)
    found = [history.get(f"log/{name}").last for name in told]
    np.testing.assert_array_equal(found, [0.5, 0.5, 1, 1, 2, np.nan, np.inf])


def test_losses_of_another_length_are_refused_with_the_numbers(tmp_path: Path):
    model = moe()
    with sp.watch(model, sgd(model), tmp_path / "run", every=1) as watch:
        model(batches(1, 10, DIM)[0])
        with pytest.raises(ValueError, match=r"got 7 losses.*model saw 10"):
            watch.losses(torch.zeros(7))


@pytest.mark.parametrize("every", [0, -1, 2.5, None])
def test_every_must_be_a_number_of_steps(tmp_path: Path, every: object):
    model = moe()
    with pytest.raises(ValueError, match="every must be a number of steps >= 1, got"):
        sp.watch(model, sgd(model), tmp_path / "run", every=every)
    assert not (tmp_path / "run").exists()


def test_what_is_no_model_or_no_optimizer_is_refused(tmp_path: Path):
    model = moe()
    with pytest.raises(ValueError, match="expected a model and its optimizer, got MoE and list"):
        sp.watch(model, [], tmp_path / "run")


# -- going on --------------------------------------------------------------------------------------


def test_a_run_resumed_from_a_checkpoint_forgets_what_came_after_it(tmp_path: Path):
    model = moe()
    optimizer = sgd(model)
    with sp.watch(model, optimizer, tmp_path / "run", every=2) as watch:
        train(model, optimizer, batches(6, 4, DIM))
        saved = copy.deepcopy(watch.state_dict())
        idle = recorded(watch).get("moe/idle_steps", "model").last
        train(model, optimizer, batches(4, 4, DIM))
        watch.note("this will not have happened")
        seconds = recorded(watch).get("run/time").until(6).last
    with sp.watch(model, optimizer, tmp_path / "run", every=2, resume=True) as watch:
        assert watch.step == 10  # without a checkpoint: after the last step there is
        watch.load_state_dict(saved)
        assert recorded(watch).last_step == 6
        train(model, optimizer, batches(2, 4, DIM, seed=9))
        history = recorded(watch)
    assert history.get("moe/load_cv", "model").steps.tolist() == [2, 4, 6, 8]
    assert history.events == ()
    assert (history.get("moe/idle_steps", "model").last <= idle + 2).all()
    assert history.get("run/time").last > seconds


def test_a_new_run_never_writes_over_an_old_one(tmp_path: Path):
    model = moe()
    names = []
    for _ in range(3):
        with sp.watch(model, sgd(model), tmp_path / "run") as watch:
            names.append(watch.run.name)
    assert names == ["run", "run-2", "run-3"]


def test_losses_that_fit_no_routed_layer_are_an_error_and_those_of_one_are_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reads, writes = sp.MoE(6, 12, experts=3), sp.MoE(6, 12, experts=3)
    model = nn.ModuleDict({"reads": reads, "writes": writes})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        (reads(torch.randn(7, 6)).sum() + writes(torch.randn(5, 6)).sum()).backward()
        with pytest.raises(ValueError, match=r"got 4 losses.*reads saw 7, writes saw 5"):
            watch.losses(torch.ones(4))
        watch.losses(torch.full((5,), 2.0))
        optimizer.step()
    history = sp.load_run(tmp_path / "run")
    assert history.places("moe/expert_loss") == ["writes"]
    told = history.get("moe/expert_loss", "writes").last
    assert set(told[np.isfinite(told)]) == {2.0}
