"""Ways to go wrong that were silent once."""

import copy
import pickle

import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dst.common import assert_same
from tests.dst.test_errors import refuse, step_once
from tests.dst.test_loops import RIGL, loss_of, mlp


def trained(method, *, steps=12, density=0.3, **kwargs):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse = sp.sparsify(model, optimizer, density=density, method=method, **kwargs)
    for step in range(steps):
        step_once(model, optimizer, step)
    return model, optimizer, sparse


def test_growing_by_gradient_after_the_weight_step():
    method = sp.Method(
        "late", grow=sp.criteria.gradient, fraction=sp.constant(0.3), due=sp.every(4), gradient="due"
    )
    _, _, sparse = trained(method)
    assert sparse.updates == 3


def test_acdc_without_warm_up_begins_sparse_and_decompresses():
    _, _, sparse = trained(sp.acdc(steps=40, phase=5, warmup=0.0), steps=0)
    assert sparse.density == pytest.approx(0.3, abs=1e-3)
    _, _, sparse = trained(sp.acdc(steps=40, phase=5, warmup=0.0), steps=7)
    assert sparse.density == 1


@pytest.mark.parametrize("method", [sp.top_kast(backward=0.6), sp.nm(2, 4)], ids=["top_kast", "nm"])
def test_latent_weights_survive_freezing(method):
    density = None if method.density else 0.3
    model, optimizer, sparse = trained(method, density=density, steps=5)
    before = sparse.layers["2"].weight.reserve.clone()
    model[2].requires_grad_(False)
    for step in range(5, 9):
        step_once(model, optimizer, step)
    assert before.any()
    assert torch.equal(sparse.layers["2"].weight.reserve, before)


def test_after_detach_nothing_moves_outside_the_forward_set():
    model, optimizer, sparse = trained(sp.top_kast(backward=0.8), steps=6)
    counts = {name: t.nnz for name, t in sparse.topologies.items()}
    sparse.detach()
    for step in range(6, 10):
        step_once(model, optimizer, step)
    assert {n: int((sparse.layers[n].weight.param != 0).sum()) for n in counts} == counts
    sparse.attach(optimizer)
    step_once(model, optimizer, 10)
    assert sparse.step == 7


def test_an_optimizer_with_momentum_from_before_does_not_revive_missing_weights():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        step_once(model, optimizer, step)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.static())
    sparse.detach()
    step_once(model, optimizer, 4)
    assert not model[0].weight[~sparse.topologies["0"].mask()].any()


def test_a_model_cannot_be_sparsified_twice_by_accident():
    model = mlp()
    sparse = sp.sparsify(model, density=0.3, method=sp.static())
    with pytest.raises(ValueError, match=r"layers \['0', '2', '4'\] are sparse already; densify"):
        sp.sparsify(model, density=0.3, method=sp.static())
    sparse.densify()
    assert sparse.density == 1
    sp.sparsify(model, density=0.3, method=sp.static())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "rigl"}, "method must be a Method such as sp.rigl.*got 'rigl'"),
        ({"method": sp.rigl}, "method must be a Method such as sp.rigl"),
        ({"distribution": "erk"}, "distribution must be one such as sp.erk.*got 'erk'"),
        ({"distribution": sp.erk}, "distribution must be one such as sp.erk"),
        ({"method": sp.top_kast(backward=0.1)}, "backward density 0.1 must not be below the density 0.3"),
        ({"density": None, "distribution": {"0": 0.5}}, r"no density for \['2', '4'\]: name them too"),
    ],
)
def test_arguments_of_the_wrong_kind(kwargs, message):
    refuse(message, **kwargs)


def test_a_mapping_that_names_every_layer_needs_no_density():
    sparse = sp.sparsify(mlp(), method=sp.static(), distribution={"0": 0.5, "2": 0.25, "4": 1.0})
    assert [t.density for t in sparse.topologies.values()] == [0.5, 0.25, 1.0]


def test_a_global_ranking_and_a_distribution_exclude_each_other():
    model = mlp()
    method = sp.snip(lambda: model(torch.ones(2, 12)).sum())
    refuse("ranks all layers together, so a distribution has no say", model=model, method=method,
           distribution=sp.erk())  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sp.set_(end=0.75), "every: end must be a step, 100 .* got 0.75"),
        (lambda: sp.every(50, end=20), "every: end must be a step, 50 .* got 20"),
        (lambda: sp.rigl(steps=1000, fraction=3.0), r"fraction must lie in \[0, 1\] .* got 3.0"),
        (lambda: sp.set_(fraction=-1.0), r"fraction must lie in \[0, 1\] .* got -1.0"),
        (
            lambda: sp.Method("m", momentum=sp.DenseMomentum(), gradient="due"),
            "needs gradient='always', got 'due'",
        ),
    ],
)
def test_arguments_that_used_to_be_taken_in_silence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_schedule_names_its_end():
    with pytest.raises(TypeError, match="end"):
        sp.cosine(0.3)


@pytest.mark.parametrize("make", [sp.rigl, sp.itop, sp.mest, sp.srigl, sp.snfs, sp.granet])
def test_every_method_takes_a_schedule_for_its_fraction(make):
    assert make(steps=4000, fraction=sp.linear(0.2, end=100)).fraction(50) == pytest.approx(0.1)


def test_dropping_without_growing_is_refused():
    method = sp.Method("odd", fraction=sp.constant(0.3), due=sp.every(2))
    with pytest.raises(ValueError, match=r"method 'odd' drops weights at step 2 .* no grow score"):
        trained(method)


def test_a_layer_that_takes_no_part_in_a_step_waits():
    model = mlp()
    spare = nn.Linear(12, 12)
    both = nn.ModuleList([model, spare])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05)
    sparse = sp.sparsify(both, optimizer, density=0.3, method=sp.mest(steps=40, every=4))
    first = sparse.topologies["1"]
    for step in range(9):
        step_once(model, optimizer, step)
    assert sparse.updates == 2
    assert sparse.topologies["1"].same_as(first)


def test_costs_of_a_method_that_does_not_say_how_long_it_runs(capsys):
    method = sp.Method(
        "own", grow=sp.criteria.gradient, fraction=sp.constant(0.1), due=lambda step: step == 7,
        gradient="due",
    )  # fmt: skip
    sparse = sp.sparsify(mlp(), density=0.3, method=method)
    sparse.summary()
    assert "training step unknown" in capsys.readouterr().out
    assert sparse.flops().forward_ratio == pytest.approx(0.3, abs=1e-2)


@pytest.mark.parametrize(
    "method",
    [sp.rigl(**RIGL), sp.set_(), sp.top_kast(backward=0.5), sp.acdc(steps=40, phase=5), sp.mest(steps=400)],
    ids=lambda method: method.name,
)
def test_a_sparsifier_can_be_pickled_with_its_model_and_optimizer(method):
    model, optimizer, sparse = trained(method, steps=6)
    others = pickle.loads(pickle.dumps((model, optimizer, sparse)))
    for step in range(6, 15):
        step_once(model, optimizer, step)
        step_once(others[0], others[1], step)
    assert_same(model.state_dict(), others[0].state_dict())
    assert_same(sparse.state_dict(), others[2].state_dict())


def test_a_ticket_at_full_density_keeps_its_patterns():
    sparse = sp.lottery_ticket(mlp(), lambda sparse, start, stop: None, 1.0, include=["2"])
    assert list(sparse.layers) == ["2"]


def test_an_error_in_a_latent_update_leaves_the_model_asleep():
    model, optimizer, sparse = trained(sp.top_kast(backward=0.6), steps=3)
    counts = {n: t.nnz for n, t in sparse.topologies.items()}
    good = copy.deepcopy(sparse.method)
    sparse.method = sp.Method(
        "broken", grow=lambda view: view.latent * float("nan"), fraction=sp.constant(1.0),
        due=sp.every(1), latent=good.latent,
    )  # fmt: skip
    with pytest.raises(ValueError, match="grow scores are NaN"):
        step_once(model, optimizer, 3)
    assert {n: int((sparse.layers[n].weight.param != 0).sum()) for n in counts} == counts
    sparse.method = good
    step_once(model, optimizer, 4)


def probe(kind, model, x, y):
    """A gradient that never reaches `.grad`: of the input, or of the weights, by torch.autograd.grad."""
    loss = 50 * nn.functional.cross_entropy(model(x), y)
    if kind == "input":
        torch.autograd.grad(loss, x)
    elif kind == "inputs=":
        loss.backward(inputs=[x])
    else:
        torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("storage", ["masked", "compressed"])
@pytest.mark.parametrize("kind", ["input", "inputs=", "weights"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gradient_of_something_else_has_no_say_in_an_update(storage, kind, when):
    outcomes = []
    for probed in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL), storage=storage)
        for step in range(22):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step + 900)).requires_grad_()
            optimizer.zero_grad()
            if probed and when == "before":
                probe(kind, model, x, torch.zeros(8, dtype=torch.int64))
            loss_of(model, step).backward()
            if probed and when == "after":
                probe(kind, model, x, torch.zeros(8, dtype=torch.int64))
            optimizer.step()
        outcomes.append(sparse)
    assert outcomes[0].updates == outcomes[1].updates == 2
    for name, topology in outcomes[0].topologies.items():
        assert topology.same_as(outcomes[1].topologies[name])


def test_a_checkpoint_of_a_compressed_model_without_the_sparsifiers_is_refused():
    trained_model, _, _ = trained(sp.rigl(**RIGL), steps=25, storage="compressed")
    model, optimizer, sparse = trained(sp.rigl(**RIGL), steps=0, storage="compressed")
    model.load_state_dict(trained_model.state_dict())
    with pytest.raises(ValueError, match="topology is not the one this Sparsifier knows"):
        step_once(model, optimizer, 0)
    assert sparse.step == 0


@pytest.mark.parametrize("storage", ["masked", "compressed"])
def test_the_dense_state_dict_fits_the_dense_model_and_averages_rightly(storage):
    model, _, sparse = trained(sp.rigl(**RIGL), steps=15, storage=storage)
    plain = mlp()
    plain.load_state_dict(sparse.dense_state_dict())
    x = torch.randn(4, 12)
    torch.testing.assert_close(plain(x), model(x))


def test_the_method_can_be_replaced_by_one_of_its_kind_alone():
    model, optimizer, sparse = trained(sp.rigl(**RIGL), steps=5)
    sparse.method = sp.set_(every=2)
    for step in range(5, 9):
        step_once(model, optimizer, step)
    assert sparse.updates == 2
    with pytest.raises(ValueError, match="method must be a Method"):
        sparse.method = "set"
    with pytest.raises(ValueError, match=r"'nm' cannot take over from 'set': .* keeps missing weights"):
        sparse.method = sp.nm(2, 4)
    with pytest.raises(ValueError, match="keeps a dense momentum"):
        sparse.method = sp.snfs(steps=100, every=10)


def test_compressed_layers_say_which_types_they_take():
    model, _, _ = trained(sp.static(), steps=0, storage="compressed")
    with pytest.raises(ValueError, match=r"expected inputs of torch.float32, got torch.float64"):
        model(torch.zeros(2, 12, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"its weights are torch.bfloat16; use .*storage='masked'"):
        model.bfloat16()(torch.zeros(2, 12, dtype=torch.bfloat16))


def test_sparsifying_a_compressed_model_twice_says_so():
    model, optimizer, _ = trained(sp.static(), steps=0, storage="compressed")
    with pytest.raises(ValueError, match=r"layers \['0', '2', '4'\] are sparse already"):
        sp.sparsify(model, optimizer, density=0.3, method=sp.static())
    with pytest.raises(ValueError, match="the first argument must be the model, got SGD"):
        sp.sparsify(optimizer, model, density=0.3, method=sp.static())
