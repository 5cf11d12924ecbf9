"""Every router × estimator × balancer × capacity trains a small task or is refused with a sentence."""

import warnings

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.moe import routers

TOKEN_CHOICE = {
    "softmax": routers.softmax(jitter=0.01),
    "sigmoid": routers.sigmoid(),
    "cosine": routers.cosine(),
}
DECIDED = {
    "gshard": routers.gshard(),
    "expert choice": routers.expert_choice(),
    "base": routers.base(),
    "sinkhorn": routers.sinkhorn(),
    "relu": routers.relu(),
    "hash": routers.hashed(),
}
ESTIMATORS = {
    "default": None,
    "gating": sp.GatingOnly(),
    "normalised": sp.GatingOnly(normalise=True),
    "sampled": sp.GatingOnly(sample=True),
    "euler": sp.euler,
    "midpoint": sp.midpoint,
    "heun3": sp.heun3,
    "simpson": sp.simpson,
    "gauss2": sp.gauss2,
    "gauss3": sp.gauss3,
    "radau": sp.radau,
    "lobatto": sp.lobatto,
    "sparsemixer": sp.SparseMixer(r=0.5),
    "sparsemixer code": sp.SparseMixer(r=0.5, rule="code", expert_grad="code", omega=False),
    "sparsemixer2": sp.SparseMixer2(r=0.5),
    "sparsemixer2*": sp.SparseMixer2Star(r=0.5),
    "straight-through": sp.StraightThrough(),
    "gumbel": sp.GumbelStraightThrough(),
    "reinforce": sp.Reinforce(),
    "densemixer": sp.DenseMixer(),
    "default moe": sp.DefaultMoE(),
}
SAMPLES = {"sampled", *ESTIMATORS} - {
    "default",
    "gating",
    "normalised",
    "densemixer",
    "default moe",
}
TOP1 = {"straight-through", "gumbel", "reinforce"}
DENSE = {"straight-through", "gumbel", "densemixer"}
BALANCERS = {
    "none": (),
    "switch": (sp.SwitchLoss(),),
    "sequence": (sp.SwitchLoss(over="sequence"),),
    "global+z": (sp.SwitchLoss(sp.linear(0.0, 0.01, end=5), over="global"), sp.ZLoss()),
    "importance": (sp.ImportanceLoss(),),
    "entropy": (sp.EntropyLoss(token=0.1),),
    "bias": (sp.LossFreeBias(0.01),),
}
CAPACITIES = {"none": None, "position": 1.5, "prob": sp.Capacity(1.25, minimum=2, drop="prob")}

SWITCHES = {"switch", "sequence", "global+z"}


def why_not(router, estimator, balance, capacity, k):
    """The sense of it, said once more and from the outside: every reason against a combination."""
    limited, sampled = capacity != "none", estimator in SAMPLES
    even = router in ("expert choice", "base")
    reasons = {
        "decides by itself": router in DECIDED and estimator != "default",
        "chooses 2": router == "gshard" and k != 2,
        "chooses 1": router == "base" and k != 1,
        "fills all experts equally": even and limited,
        "same load": even and balance in SWITCHES | {"bias"},
        "is fixed": router == "hash" and balance != "none",
        "moves a top-k selection": balance == "bias" and (router in DECIDED or sampled) and not even,
        "its own balanced penalty": router == "relu" and balance in SWITCHES,
        "one expert a token": estimator in TOP1 and k != 1,
        "draws experts from a distribution": router in ("sigmoid", "base") and sampled,
        "every expert on every token": estimator in DENSE and limited,
        "learn nothing": estimator == "normalised" and k == 1,
    }
    return "|".join(reason for reason, holds in reasons.items() if holds)


def build(router, estimator, balance, capacity, k):
    return sp.MoE(
        dim=8,
        hidden=8,
        experts=4,
        k=k,
        router={**TOKEN_CHOICE, **DECIDED}[router],
        estimator=ESTIMATORS[estimator],
        balance=BALANCERS[balance],
        capacity=CAPACITIES[capacity],
        causal=False,
    )


def train(model, steps=5):
    moe = model[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.08, foreach=False)
    sp.follow_steps(model, optimizer)
    ids = torch.arange(32).view(2, 16)
    centres = torch.randn(32, 8)
    goal = torch.randn(32, 3)
    x, target = centres[ids] + 0.05 * torch.randn(2, 16, 8), goal[ids]
    reinforced = isinstance(moe.estimator, sp.Reinforce)
    losses = []
    for _ in range(steps):
        loss = (model[1](x + moe(x, ids=ids)) - target).square().mean()
        total = loss + sp.balance_loss(model)
        if reinforced:
            total = total + 0.1 * sp.reinforce_loss(model, loss)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("router", [*TOKEN_CHOICE, *DECIDED])
def test_every_combination_trains_or_is_refused(router, k):
    trained = refused = 0
    for estimator in ESTIMATORS:
        for balance in BALANCERS:
            for capacity in CAPACITIES:
                reason = why_not(router, estimator, balance, capacity, k)
                if reason:
                    with pytest.raises(ValueError, match=reason):
                        build(router, estimator, balance, capacity, k)
                    refused += 1
                    continue
                torch.manual_seed(0)
                model = nn.Sequential(build(router, estimator, balance, capacity, k), nn.Linear(8, 3))
                losses = train(model)
                assert min(losses[-3:]) < 0.95 * losses[0], (estimator, balance, capacity, losses)
                trained += 1
    assert trained + refused == len(ESTIMATORS) * len(BALANCERS) * len(CAPACITIES)
    assert trained > 0 or (router, k) in {("gshard", 1), ("base", 2)}


@pytest.mark.parametrize("estimator", [n for n in ESTIMATORS if n != "normalised"])
def test_same_seed_same_routing_and_inference_is_deterministic(estimator):
    x = torch.randn(64, 8)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        moe = build("softmax", estimator, "none", "none", 1)
        outs.append((moe(x), moe.routing.expert))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    moe.eval()
    assert torch.equal(moe(x), moe(x))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"k=5 experts a token cannot be chosen from experts=4"):
        sp.MoE(8, 16, experts=4, k=5)
    with pytest.raises(ValueError, match="holds no token"):
        sp.MoE(8, 16, experts=4, capacity=0.0)
    with pytest.raises(ValueError, match="holds no token"):
        sp.Capacity(minimum=0)
    with pytest.raises(ValueError, match=r"ignored it.*\(7, 8\)"):
        sp.MoE(8, 16, experts=4, expert=lambda dim, hidden: sp.MLP(dim, 7))
    with pytest.raises(ValueError, match="does not take inputs of width 8"):
        sp.MoE(8, 16, experts=4, expert=lambda dim, hidden: nn.Linear(hidden, hidden))
    with pytest.raises(ValueError, match="maps it to"):
        sp.MoE(8, 16, experts=4, expert=nn.Linear)
    with pytest.raises(ValueError, match="Reinforce is defined for one expert a token, got k=2"):
        sp.MoE(8, 16, experts=4, k=2, estimator=sp.Reinforce())
    with pytest.raises(ValueError, match="expert must be"):
        sp.MoE(8, 16, experts=4, expert="linear")
    with pytest.raises(ValueError, match="needs the token ids"):
        sp.MoE(8, 16, experts=4, router=routers.hashed())(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="inputs of width 8"):
        sp.MoE(8, 16, experts=4)(torch.zeros(2, 7))


def test_nan_logits_name_the_layer_and_count_the_tokens():
    model = nn.Sequential(nn.Identity(), sp.MoE(8, 16, experts=4))
    sp.balance_loss(model)
    x = torch.randn(10, 8)
    x[3, 0] = x[7, 2] = torch.nan
    with pytest.raises(ValueError, match=r"MoE '1': .* 2 of 10 tokens are NaN"):
        model(x)
    assert not model[1].ledger.load.any()  # nothing half-counted


def test_expert_choice_warns_in_a_causal_model_and_says_why():
    for causal in (True, None):
        with pytest.warns(UserWarning, match="depend on later tokens"):
            sp.MoE(8, 16, experts=4, router=routers.expert_choice(), causal=causal)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.MoE(8, 16, experts=4, router=routers.expert_choice(), causal=False)
