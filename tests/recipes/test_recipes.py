"""Every recipe learns: dense, with sparse weights, with sparse paths, and with both."""

import math
import statistics

import pytest
import torch

import sparsight as sp
from sparsight.recipes import Paths, Weights
from sparsight.recipes.find import OURS
from tests.recipes.conftest import Tiny

DENSE, SPARSE = Weights(), Weights(density=0.3)
ONE, MIXED = Paths(), Paths(experts=3, estimator="sparsemixer")
STEPS = 30


def run(training: sp.Training) -> list[float]:
    losses = [training.step(i)["loss"] for i in range(training.steps)]
    assert all(math.isfinite(loss) for loss in losses)
    return losses


@pytest.mark.parametrize(("weights", "paths"), [(DENSE, ONE), (SPARSE, ONE), (DENSE, MIXED), (SPARSE, MIXED)])
@pytest.mark.parametrize("recipe", OURS)
def test_the_loss_falls(recipe: str, weights: Weights, paths: Paths, tiny: Tiny):
    training = tiny.make(recipe, steps=STEPS, weights=weights, paths=paths)
    losses = run(training)[:STEPS]
    assert statistics.mean(losses[-5:]) < 0.9 * statistics.mean(losses[:3])
    assert any(isinstance(module, sp.MoE) for module in training.model.modules()) == bool(paths.experts)
    if weights is SPARSE:
        sparse = training.parts["sparse"]
        assert isinstance(sparse, sp.Sparsifier)
        assert abs(sparse.density - 0.3) < 0.01
        assert sparse.step == training.steps
        assert sparse.updates > 1
    training.model.eval()
    with torch.no_grad():
        metrics = training.evaluate()
    assert math.isfinite(metrics[training.main])


def test_the_resnet_learns_too(tiny: Tiny):
    training = tiny.make(
        "image", network="resnet", width=4, steps=20, weights=SPARSE, paths=Paths(experts=2, balance="bias")
    )
    losses = run(training)
    assert statistics.mean(losses[-4:]) < 0.9 * losses[0]


@pytest.mark.parametrize("method", [
    "rigl", "set", "static", "snfs", "itop", "mest", "gmp", "granet", "acdc", "srigl", "top_kast", "snip",
])  # fmt: skip
def test_every_method_can_be_chosen(method, tiny: Tiny):
    training = tiny.make("image", steps=12, weights=Weights(0.3, method), paths=Paths(experts=2))
    run(training)
    sparse = training.parts["sparse"]
    assert isinstance(sparse, sp.Sparsifier)
    assert sparse.method.name == method
    assert sparse.density <= 0.31


@pytest.mark.parametrize("estimator", [
    "switch", "sparsemixer", "sparsemixer2", "sparsemixer2star", "euler", "midpoint", "heun3", "simpson",
    "gauss2", "gauss3", "radau", "lobatto", "straight_through", "gumbel", "densemixer", "default_moe",
])  # fmt: skip
def test_every_estimator_can_be_chosen(estimator, tiny: Tiny):
    run(tiny.make("image", steps=3, paths=Paths(experts=3, estimator=estimator)))


def test_the_names_above_are_all_there_are():
    from typing import get_args

    from sparsight.recipes import knobs

    marks = {
        test.__name__: set(test.pytestmark[0].args[1])
        for test in (test_every_method_can_be_chosen, test_every_estimator_can_be_chosen)
    }
    assert marks["test_every_method_can_be_chosen"] == set(get_args(knobs.MethodName))
    assert marks["test_every_estimator_can_be_chosen"] == set(get_args(knobs.EstimatorName))


def test_two_experts_a_token(tiny: Tiny):
    training = tiny.make("language", steps=3, paths=Paths(experts=4, k=2, capacity=1.5))
    run(training)
    layer = next(module for module in training.model.modules() if isinstance(module, sp.MoE))
    assert layer.routing is not None
    assert len(layer.routing.token) == 2 * 8 * 16


@pytest.mark.parametrize("recipe", ["translation", "electra"])
def test_padding_reaches_no_expert(recipe: str, tiny: Tiny):
    training = tiny.make(recipe, steps=2, paths=Paths(experts=2))
    layers = [module for module in training.model.modules() if isinstance(module, sp.MoE)]
    masks = []
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, kwargs, out: masks.append(kwargs["mask"]), with_kwargs=True
        )
    training.step(0)
    assert len(masks) == len(layers)
    for layer, mask in zip(layers, masks, strict=True):
        assert not mask.all()
        assert layer.routing is not None
        assert layer.routing.tokens == int(mask.sum())


def test_a_step_depends_on_its_number_and_the_seed_alone(tiny: Tiny):
    def first(seed: int) -> float:
        return tiny.make("language", steps=2, seed=seed).step(0)["loss"]

    assert first(1) == first(1) != first(2)


def test_bad_knobs_are_told(tiny: Tiny):
    with pytest.raises(ValueError, match="density must lie in"):
        Weights(density=90)
    with pytest.raises(ValueError, match="image: width must be positive, got -3"):
        tiny.make("image", width=-3)
    with pytest.raises(ValueError, match="too short to hold out pieces of 512"):
        tiny.make("language", length=512)
    with pytest.raises(ValueError, match="17 cannot be divided among 2 heads"):
        tiny.make("language", width=17)
    with pytest.raises(ValueError, match="a path needs --data"):
        tiny.make("image", data="digits")
    with pytest.raises(ValueError, match="loss-free bias moves a top-k selection"):
        tiny.make("image", paths=Paths(experts=2, estimator="sparsemixer", balance="bias"))
