"""Bad input gets a ValueError that says what came, what was expected and where, and changes nothing."""

import copy
import math

import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dst.common import assert_same
from tests.dst.test_loops import RIGL, loss_of, mlp


def refuse(message: str, **kwargs) -> None:
    """`sparsify` refuses, and neither model nor optimizer has anything on it afterwards."""
    model = kwargs.pop("model", None) or mlp()
    optimizer = kwargs.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    arguments = {"density": 0.3, "method": sp.rigl(**RIGL)} | kwargs
    with pytest.raises(ValueError, match=message):
        sp.sparsify(model, optimizer, **arguments)
    assert_same(model.state_dict(), before)
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, math.nan])
def test_density_outside_the_unit_interval(density):
    refuse(rf"density must lie in \(0, 1\], got {density}", density=density)


def test_no_density():
    refuse("method 'rigl' needs a density", density=None)
    refuse("method 'nm' has density 0.5, got density=0.3", method=sp.nm(2, 4))


def test_a_density_that_leaves_a_layer_empty():
    refuse(r"a budget of 1 weights for 3 layers: expected between 3", density=0.002)


def test_a_pattern_that_matches_no_layer_suggests_the_nearest():
    model = nn.Sequential()
    model.encoder, model.decoder = nn.Linear(8, 8), nn.Linear(8, 8)
    refuse(
        r"include pattern 'encodre' matches no layer; did you mean \['encoder",
        model=model,
        include=["encodre"],
    )
    refuse(r"keep_dense pattern 'dec' matches no layer; did you mean", model=model, keep_dense=["dec"])
    refuse(
        r"pattern 'dec' matches no layer; there are \['encoder', 'decoder'\]",
        model=model,
        distribution={"dec": 0.5},
    )


def test_a_layer_named_twice():
    refuse(r"layer '0' is named twice, by '0' and '\*'", distribution={"0": 0.5, "*": 0.1})
    refuse("include names '0' twice", include=["0", "0"])
    refuse("include must be a sequence of patterns, got the string '0'", include="0")


def test_nothing_left_to_sparsify():
    refuse("no layer to sparsify", keep_dense=["*"])
    refuse("no layer to sparsify", model=nn.Sequential(nn.LayerNorm(4)))


def test_an_optimizer_that_holds_none_of_the_weights():
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"optimizer \(SGD\) holds none of the sparse weights \['0'"):
        sp.sparsify(model, other, density=0.3, method=sp.static())
    assert_same(model.state_dict(), before)


def test_n_of_m_that_does_not_divide_the_fan_in():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    refuse(
        r"layer '1': 2:4 needs a fan-in that 4 divides, got 6", model=model, density=None, method=sp.nm(2, 4)
    )
    with pytest.raises(ValueError, match="0 < N <= M, got 5:4"):
        sp.nm(5, 4)


def test_blocks_that_do_not_divide_the_weight():
    refuse(r"layer '4': blocks of 4x1 do not divide a weight of 3x16", method=sp.block(4, 1, steps=400))


def test_an_unknown_storage():
    refuse("storage must be .*, got 'quantum'", storage="quantum")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sp.rigl(steps=0), "steps must be the length of the training, got 0"),
        (lambda: sp.rigl(steps=50), r"every 100 steps that ends at step 37 never happens"),
        (lambda: sp.rigl(steps=1000, end=1.5), r"share of the training in \(0, 1\], got 1.5"),
        (lambda: sp.every(0), "at least 1 step, got 0"),
        (lambda: sp.cosine(0.3, begin=5, end=5), "begin < end, got begin=5, end=5"),
        (lambda: sp.exponential(0.3, half_life=0), "half_life must be positive"),
        (lambda: sp.top_kast(backward=0.0), "top_kast: backward must be a density"),
        (lambda: sp.acdc(steps=100, warmup=0.6, finish=0.6), r"warmup \+ finish < 1"),
        (lambda: sp.block(0, 1, steps=1000), "at least 1, got 0x1"),
    ],
)
def test_arguments_of_methods_and_schedules(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.1, "half"])
def test_a_schedule_that_leaves_the_unit_interval(value):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = sp.rigl(steps=40, every=1, fraction=lambda step: value)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=method)
    step_once(model, optimizer, 0)
    unchanged = copy.deepcopy((model.state_dict(), sparse.state_dict()))
    with pytest.raises(ValueError, match=rf"drop fraction at step 1 must lie in \[0, 1\], got {value}"):
        step_once(model, optimizer, 1)
    assert_same(model.state_dict(), unchanged[0])
    assert_same(sparse.state_dict(), unchanged[1])


def step_once(model, optimizer, step, poison=None):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if poison is not None:
        poison()
    optimizer.step()


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_a_nan_at_a_due_step_changes_nothing_in_any_layer(where):
    """The NaN is in the second layer; the first must not have been rewired when it is found."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(steps=40, every=4))
    for step in range(4):
        step_once(model, optimizer, step)
    topologies = sparse.topologies
    optimizer.zero_grad()
    loss = loss_of(model, 4)
    if where == "gradient":
        loss = loss + (model[2].weight * math.nan).sum()
    loss.backward()
    if where == "weight":
        with torch.no_grad():
            values = sparse.topologies["2"].positions()[:3]
            model[2].weight.view(-1)[values] = math.nan
    with pytest.raises(ValueError, match=r"layer '2': \d+ of \d+ (drop|grow) scores are NaN"):
        optimizer.step()
    for name, topology in topologies.items():
        assert topology.same_as(sparse.topologies[name])
    assert sparse.updates == 0


def test_a_state_dict_of_another_model_names_the_first_difference():
    sparse = sp.sparsify(mlp(), density=0.3, method=sp.rigl(**RIGL))
    before = sparse.state_dict()
    wider = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 3))
    other = sp.sparsify(wider, density=0.3, method=sp.static()).state_dict()
    with pytest.raises(ValueError, match=r"'0.shape' is \(30, 12\) in the saved state and \(24, 12\) here"):
        sparse.load_state_dict(other)
    fewer = sp.sparsify(mlp(), density=0.3, method=sp.static(), keep_dense=["2"]).state_dict()
    with pytest.raises(ValueError, match=r"'2.shape' is missing from the saved state"):
        sparse.load_state_dict(fewer)
    latent = sp.sparsify(mlp(), density=0.3, method=sp.top_kast(backward=0.5)).state_dict()
    with pytest.raises(ValueError, match=r"the saved state has '0.reserve'"):
        sparse.load_state_dict(latent)
    broken = dict(before)
    broken["2.col"] = broken["2.col"].flip(0)
    with pytest.raises(ValueError, match="sorted"):
        sparse.load_state_dict(broken)
    assert_same(sparse.state_dict(), before)


def test_weights_loaded_without_the_sparsifiers_state_are_refused():
    """The checkpoint's zeros lie elsewhere: going on would silently cut half of its weights."""
    trained = mlp()
    sp.sparsify(trained, density=0.3, method=sp.static(), seed=5)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.static(), seed=6)
    model.load_state_dict(trained.state_dict())
    with pytest.raises(ValueError, match=r"layer '0': \d+ weights that do not exist .* load the Sparsifier"):
        step_once(model, optimizer, 0)
    assert_same(model.state_dict(), trained.state_dict())
    sparse.enforce()
    step_once(model, optimizer, 0)
    assert sparse.step == 1


def test_a_criterion_that_asks_for_what_the_method_does_not_collect():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = sp.Method("odd", grow=sp.criteria.gradient, fraction=sp.constant(0.3), due=sp.every(1))
    sp.sparsify(model, optimizer, density=0.3, method=method)
    with pytest.raises(ValueError, match=r"layer '0': this criterion needs the dense gradient"):
        step_once(model, optimizer, 0)


def test_a_criterion_of_the_wrong_length():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = sp.Method("odd", grow=lambda view: view.values, fraction=sp.constant(0.3), due=sp.every(1))
    sp.sparsify(model, optimizer, density=0.3, method=method)
    with pytest.raises(ValueError, match=r"layer '0': the grow score must have 288 numbers, got \d+"):
        step_once(model, optimizer, 0)


def test_a_loss_that_does_not_reach_a_layer_cannot_score_it():
    model = mlp()
    method = sp.snip(lambda: model[0](torch.ones(2, 12)).sum())
    refuse(r"the loss does not depend on the weights of \['2', '4'\]", model=model, method=method)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: sp.prune(m, 0.0), r"density must lie in \(0, 1\], got 0.0"),
        (lambda m: sp.prune(m, 0.5, rounds=0), "rounds must be at least 1, got 0"),
        (lambda m: sp.lottery_ticket(m, print, 0.5, rate=1.0), r"rate must lie in \(0, 1\), got 1.0"),
        (lambda m: sp.lottery_ticket(m, print, 2.0), r"density must lie in \(0, 1\], got 2.0"),
    ],
)
def test_pruning_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(mlp())
