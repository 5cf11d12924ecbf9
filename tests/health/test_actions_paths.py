"""Actions on routed layers: each does what it says, refuses what makes no sense, and can be taken back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.dynamics.routes import Part, Route, Seen, find_routes, routed
from sparsight.health.actions import RefusedError, Run
from sparsight.moe.balancers import at

A = sp.actions


def run_of(model: nn.Module, optimizer=None, sparsifier=None, adapters=(), **known) -> Run:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    routes = tuple(find_routes(model, (*adapters, routed)))
    loads = known.pop("loads", None)
    told = {} if loads is None else {routes[0].name: np.array(loads, float)}
    return Run(model, optimizer, routes, sparsifier, loads=told, **known)


def moe(**options) -> sp.MoE:
    return sp.MoE(8, 16, 4, **options)


def train(model, optimizer, steps=3, rows=64):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(rows, 8)).square().mean() + sp.balance_loss(model)).backward()
        optimizer.step()


def coefs(model: sp.MoE, step: int = 0) -> list[float]:
    return [at(getattr(b, "coef", getattr(b, "rate", 0.0)), step) for b in model.ledger.balancers]


def test_balance_multiplies_coefficients_schedules_and_rates_but_not_the_z_loss():
    schedule = sp.linear(0.1, 0.2, end=10)
    model = moe(balance=[sp.SwitchLoss(0.01), sp.EntropyLoss(schedule), sp.ZLoss(0.5), sp.LossFreeBias(0.1)])
    done = A.Balance(times=3.0).apply(run_of(model))
    assert coefs(model) == pytest.approx([0.03, 0.3, 0.5, 0.3])
    assert coefs(model, 10)[1] == pytest.approx(0.6)
    done.undo()
    assert coefs(model) == [0.01, 0.1, 0.5, 0.1]
    assert coefs(model, 10)[1] == 0.2


def test_balance_adds_a_switch_loss_where_the_loop_asks_for_one():
    model = moe()
    with pytest.raises(RefusedError, match="balance_loss"):
        A.Balance(least=0.01).apply(run_of(model))
    keys = list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    done = A.Balance(least=0.25).apply(run_of(model, optimizer))
    assert coefs(model) == [0.25]
    assert list(model.state_dict()) == keys
    model(torch.randn(32, 8))
    assert sp.balance_loss(model) > 0
    done.undo()
    assert model.ledger.balancers == ()
    model(torch.randn(32, 8))
    assert sp.balance_loss(model) == 0


def test_balance_scales_the_coefficient_of_a_foreign_model():
    model, adapters = foreign()
    model.router_aux_loss_coef = 0.001
    done = A.Balance(times=2.0).apply(run_of(model, adapters=adapters))
    assert model.router_aux_loss_coef == 0.002
    done.undo()
    assert model.router_aux_loss_coef == 0.001


@pytest.mark.parametrize(
    ("action", "options", "read", "expected"),
    [
        (A.Noise(jitter=0.2), {}, lambda m: m.router_kind.jitter, 0.2),
        (
            A.Temperature(times=2.0),
            {"estimator": sp.SparseMixer2Star()},
            lambda m: m.estimator.temperature,
            4.0,
        ),
        (A.WidenMask(times=2.0), {"estimator": sp.SparseMixer()}, lambda m: m.estimator.mask.r, 0.2),
        (A.CapacityFactor(times=2.0), {"capacity": 1.25}, lambda m: m.capacity.factor, 2.5),
        (A.ExpertsPerToken(k=3), {}, lambda m: m.k, 3),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "apply") else "",
)
def test_a_setting_is_set_and_taken_back(action, options, read, expected):
    model = moe(**options)
    before = read(model)
    done = action.apply(run_of(model))
    assert read(model) == pytest.approx(expected)
    model(torch.randn(16, 8))
    done.undo()
    assert read(model) == before


def test_high_k_first_says_when_to_go_back():
    done = A.ExpertsPerToken(k=4, steps=100).apply(run_of(moe()))
    assert done.later == (100, A.ExpertsPerToken(k=1))


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (A.Balance(times=0), "above 0"),
        (A.Balance("nowhere"), r"no expert layer 'nowhere'; there are: 'model'"),
        (A.Noise(jitter=1.0), r"\[0, 1\)"),
        (A.Temperature(), "CoolRouter"),
        (A.WidenMask(), "has a mask"),
        (A.CapacityFactor(), "drops nothing"),
        (A.ExpertsPerToken(k=9), "1 to 4 experts, got 9"),
        (A.Revive("", (4,)), "experts 0 to 3"),
        (A.Revive("", ()), "none at all"),
        (A.Revive("", (1,), tilt=0), "tilt > 0"),
        (A.Revive("", (1,)), "has not been read yet"),
        (A.Revive("", (1,), source=1), "cannot be the source"),
        (A.Rebalance(), "has not been read yet"),
        (A.CoolRouter(top=2.0), r"\(0, 1\)"),
        (A.ExpertRate("", (0,), times=-1), "above 0"),
        (A.Rewind(), r"keep=2"),
        (A.Search(), "nothing here is sparsified"),
        (A.Regrow(), "nothing here is sparsified"),
        (A.Every(A.Noise(), times=0), "times >= 1"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "apply") else "",
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(action, why):
    model = moe()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RefusedError, match=why):
        action.apply(run_of(model))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert (model.k, model.router_kind.jitter) == (1, 0.0)


def test_a_revived_expert_computes_like_the_busiest_and_shares_its_tokens():
    model = moe(balance=[sp.LossFreeBias(0.1)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer)
    with torch.no_grad():
        model.router.weight[3] = -10
        model.ledger.memory[0].bias[:] = torch.tensor([0.1, 0.2, 0.3, -9.0])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    run = run_of(model, optimizer, loads=[10, 50, 20, 0])
    done = A.Revive("", (3,)).apply(run)
    x = torch.randn(512, 8)
    said = model.experts[1](x), model.experts[3](x)
    assert torch.cosine_similarity(*said).mean() > 0.98
    assert not torch.equal(*said)
    assert model.ledger.memory[0].bias[3] == model.ledger.memory[0].bias[1]
    state = [optimizer.state[model.experts[e].up.weight] for e in (1, 3)]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(state[0][key], state[1][key])
        assert state[0][key] is not state[1][key]
    row = optimizer.state[model.router.weight]["exp_avg"]
    assert torch.equal(row[1], row[3])
    load = torch.bincount(model.eval()(x) is not None and model.routing.expert, minlength=4)
    assert min(load[1], load[3]) > 20
    done.undo()
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key


def test_many_revived_experts_share_whoever_is_busiest_by_then():
    model = sp.MoE(8, 16, 6)
    done = A.Revive("", (2, 3, 4, 5)).apply(run_of(model, loads=[100, 40, 0, 0, 0, 0]))
    assert "2 from 0, 3 from 0, 4 from 1, 5 from 0" in done.message


def test_revival_is_the_same_for_the_same_seed_and_step_and_draws_no_random_numbers():
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        model = moe()
        A.Revive("", (1,), source=0).apply(run_of(model, step=7, seed=5))
        made.append((model.experts[1].up.weight.detach(), torch.rand(1)))
    torch.manual_seed(3)
    moe()
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1] == torch.rand(1)


@pytest.mark.parametrize("storage", ["masked", "compressed"])
@pytest.mark.parametrize("optimizer_kind", [torch.optim.Adam, torch.optim.SGD])
def test_sparse_experts_take_over_the_topology_with_exact_counts(storage, optimizer_kind):
    model = moe()
    options = {"momentum": 0.9} if optimizer_kind is torch.optim.SGD else {}
    optimizer = optimizer_kind(model.parameters(), lr=1e-2, **options)
    method = sp.rigl(steps=100, every=4)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=method, storage=storage)
    train(model, optimizer, 3)
    counts = {name: t.nnz for name, t in sparse.topologies.items()}
    before = {k: v.clone() for k, v in sparse.dense_state_dict().items()}
    run = run_of(model, optimizer, sparse, loads=[50, 10, 10, 0])
    done = A.Revive("", (3,), noise=0.0).apply(run)
    assert {name: t.nnz for name, t in sparse.topologies.items()} == counts
    dense = sparse.dense_state_dict()
    for part in ("up", "down"):
        # Budgets of equal layers may differ by one: largest remainders.
        differ = dense[f"experts.3.{part}.weight"] != dense[f"experts.0.{part}.weight"]
        assert int(differ.sum()) <= 1
    train(model, optimizer, 6)  # across a rewiring: the Sparsifier knows its topologies
    assert {name: t.nnz for name, t in sparse.topologies.items()} == counts
    done.undo()
    assert {name: t.nnz for name, t in sparse.topologies.items()} == counts
    after = sparse.dense_state_dict()
    for part in ("up", "down"):
        assert torch.equal(after[f"experts.3.{part}.weight"], before[f"experts.3.{part}.weight"])
    train(model, optimizer, 3)


def test_sparse_experts_of_different_counts_keep_their_own():
    model = moe()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sparse = sp.sparsify(
        model, optimizer, method=sp.static(),
        distribution={"experts.0.*": 0.5, "experts.1.*": 0.25, "experts.2.*": 0.75, "experts.3.*": 0.25},
    )  # fmt: skip
    counts = {name: t.nnz for name, t in sparse.topologies.items()}
    A.Revive("", (1, 2), source=0).apply(run_of(model, optimizer, sparse))
    assert {name: t.nnz for name, t in sparse.topologies.items()} == counts
    few, many = (sparse.layers[f"experts.{e}.up"].topology.mask() for e in (1, 2))
    source = sparse.layers["experts.0.up"].topology.mask()
    assert bool((few <= source).all())
    assert bool((source <= many).all())
    train(model, optimizer)


class Fused(nn.Module):
    """Experts as slices of one parameter, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 16) / 3)

    def forward(self, x):
        logits = self.gate(x)
        top = logits.argmax(-1)
        self.chosen, self.logits = top, logits.detach()
        return torch.einsum("td,tdh->th", x, self.up[top]) * logits.softmax(-1).amax(-1, keepdim=True)


def foreign():
    model = nn.ModuleDict({"block": Fused()})

    def adapter(name: str, module: nn.Module) -> Route | None:
        if not isinstance(module, Fused):
            return None

        def see(module, args, kwargs, output):
            return Seen(module.chosen, torch.arange(len(module.chosen)), module.logits)

        parts = tuple((Part(module.up, e),) for e in range(4))
        return Route(name, module, 4, 1, see, tuple(module.gate.parameters()), parts)

    return model, (adapter,)


def test_an_expert_that_is_a_slice_is_revived_in_its_slice_alone():
    model, adapters = foreign()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model["block"](torch.randn(64, 8)).square().mean().backward()
        optimizer.step()
    before = model["block"].up.detach().clone()
    run = run_of(model, optimizer, adapters=adapters, loads=[5, 1, 0, 2])
    done = A.Revive("block", (2,)).apply(run)
    up = model["block"].up.detach()
    assert torch.equal(up[[0, 1, 3]], before[[0, 1, 3]])
    assert torch.cosine_similarity(up[2].flatten(), up[0].flatten(), 0) > 0.99
    moments = optimizer.state[model["block"].up]["exp_avg"]
    assert torch.equal(moments[2], moments[0])
    with pytest.raises(RefusedError, match=r"sp\.MoE layers; block is a Fused"):
        A.Noise("block").apply(run)
    done.undo()
    assert torch.equal(model["block"].up, before)
    A.Reinitialise("block", (1,)).apply(run)
    assert not torch.equal(up[1], before[1])
    assert not moments[1].any()
    assert torch.equal(up[0], before[0])


def test_an_expert_begins_anew_and_comes_back():
    model = moe()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    done = A.Reinitialise("", (2,)).apply(run_of(model, optimizer))
    assert model.experts[2].up.weight not in optimizer.state
    assert model.experts[2].up.weight.abs().max() <= 8**-0.5
    assert torch.equal(model.experts[1].up.weight, before["experts.1.up.weight"])
    done.undo()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert optimizer.state[model.experts[2].up.weight]["exp_avg"].any()


def test_rebalance_revives_only_who_has_little():
    model = moe()
    done = A.Rebalance().apply(run_of(model, loads=[100, 90, 1, 80]))
    assert done.message == "model: revived expert 2 from 0"
    with pytest.raises(RefusedError, match="no expert has less"):
        A.Rebalance().apply(run_of(model, loads=[10, 9, 8, 8]))


@pytest.mark.parametrize("router", [sp.routers.softmax(), sp.routers.cosine(width=8, temperature=0.01)])
def test_a_cooled_router_is_as_sure_as_asked_and_chooses_the_same(router):
    model = moe(router=router)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with torch.no_grad():
        model.router.weight.mul_(100)
    train(model, optimizer, 1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(512, 8)
    model(x)
    chosen = model.routing.expert
    assert model.routing.prob.amax(-1).mean() > 0.95
    done = A.CoolRouter(top=0.7).apply(run_of(model, optimizer))
    model(x)
    assert model.routing.prob.amax(-1).mean() == pytest.approx(0.7, abs=1e-3)
    assert torch.equal(model.routing.expert, chosen)
    assert model.router.weight not in optimizer.state
    with pytest.raises(RefusedError, match="already"):
        A.CoolRouter(top=0.71).apply(run_of(model, optimizer))
    done.undo()
    for key in before:
        if key.startswith("router"):
            assert torch.equal(before[key], model.state_dict()[key])
    assert optimizer.state[model.router.weight]["exp_avg"].any()


def test_an_action_survives_json():
    import json

    for action in (
        A.Revive("a.b", (1, 2)), A.Every(A.Rebalance("x"), steps=7), A.Search(fraction=0.2), A.Balance(),
    ):  # fmt: skip
        assert A.from_data(json.loads(json.dumps(A.as_data(action)))) == action
    with pytest.raises(ValueError, match="got 'Nothing'"):
        A.from_data({"kind": "Nothing"})


def test_an_action_on_all_layers_reaches_each():
    model = nn.Sequential(moe(), moe(capacity=1.0))
    A.Noise(jitter=0.3).apply(run_of(model))
    assert [layer.router_kind.jitter for layer in model] == [0.3, 0.3]
    with pytest.raises(RefusedError, match="which layer"):
        A.Revive("", (1,), source=0).apply(replace(run_of(model), step=1))


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_the_experts_of_transformers_are_revived(kind, tmp_path):
    import transformers

    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 1,
        "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
        "head_dim": 4, "first_k_dense_replace": 0,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.randint(1, 32, (8, 16))
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        manager = sp.manage(watch)
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        (route,) = watch.routes
        busiest = int(manager.run().loads[route.name].argmax())
        dead = (busiest + 1) % 4
        done = manager.apply(A.Revive(route.name, (dead,), noise=0.0))
        assert done.message.endswith(f"expert {dead} from {busiest}")
        for a, b in zip(route.parts[busiest], route.parts[dead], strict=True):
            assert torch.equal(a.cut(a.param), b.cut(b.param))
            moments = optimizer.state[a.param]["exp_avg"]
            assert torch.equal(a.cut(moments), b.cut(moments))
        manager.undo()
        assert not torch.equal(a.cut(a.param), b.cut(b.param))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = sp.stress(model, [({"input_ids": ids}, ids)])
    rows = [row for row in found.rows if row.shift == "expert off"]
    assert len(rows) == 4
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
