"""Stress: what shifts do is measured, and the model is the same afterwards."""

import copy

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.health import shifts
from sparsight.health.diagnose import diagnose
from tests.health.test_actions_paths import foreign


class Classifier(nn.Module):
    """Two routed layers, a batch norm and a dropout, so that there is something to disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.first = sp.MoE(12, 24, 4, balance=[sp.SwitchLoss(0.02), sp.LossFreeBias(0.01)])
        self.drop = nn.Dropout(0.1)
        self.second = sp.MoE(12, 24, 4, k=2)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.norm(x)
        x = x + self.first(x)
        return self.head(x + self.second(self.drop(x)))


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=generator)
    return x, x[:, :3].argmax(1)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sp.follow_steps(model, optimizer)
    for step in range(120):
        x, y = data(256, step)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + sp.balance_loss(model)).backward()
        optimizer.step()
    return model


def test_quality_falls_with_strength_and_routes_move(trained):
    found = sp.stress(trained, [data(512, 900), data(512, 901)])
    rows = {(row.shift, row.strength): row for row in found.rows}
    assert found.clean.quality > 0.85
    noise = [rows["noise", s] for s in ("0.1", "0.3", "1")]
    assert noise[0].quality > noise[1].quality > noise[2].quality
    assert noise[2].paths["first"].change > noise[0].paths["first"].change > 0
    assert rows["feature permutation", "1"].quality < 0.6
    assert ("blur", "1") not in rows
    assert ("token corruption", "0.05") not in rows
    assert all(row.drop == pytest.approx(1 - row.quality / found.clean.quality) for row in found.rows)
    for expert in range(4):
        row = rows["expert off", f"first[{expert}]"]
        load = found.clean.paths["first"].load[expert]
        assert row.paths["first"].load[expert] == 0
        assert row.paths["first"].change == pytest.approx(load)  # its tokens, and nobody else's
        assert load > 0
    assert rows["router noise", "0.3"].paths["second"].change > 0
    assert found.worst().drop == max(row.drop for row in found.rows)


def test_the_model_is_unchanged_to_the_bit(trained):
    trained.train()
    trained.drop.eval()
    trained(data(64, 7)[0])
    before = copy.deepcopy(trained.state_dict())
    modes = [module.training for module in trained.modules()]
    routing, random = trained.first.routing, torch.random.get_rng_state()
    hooks = [len(module._forward_hooks) for module in trained.modules()]
    versions = [p.requires_grad for p in trained.parameters()]
    sp.stress(trained, [data(128, 900)])
    for key, value in trained.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert [module.training for module in trained.modules()] == modes
    assert trained.first.routing is routing
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [len(module._forward_hooks) for module in trained.modules()] == hooks
    assert [p.requires_grad for p in trained.parameters()] == versions
    trained(data(64, 8)[0]).sum().backward()  # and it trains on


def test_it_is_unchanged_even_where_quality_fails(trained):
    before = copy.deepcopy(trained.state_dict())
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of memory")
        return 1.0

    with pytest.raises(RuntimeError, match="out of memory"):
        sp.stress(trained, [data(32, 1)], quality=failing, shifts=[shifts.RouterNoise()])
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())


def test_the_table_has_a_row_for_each_shift_and_a_part_for_each_layer(trained):
    found = sp.stress(trained, [data(64, 900)], shifts=[shifts.RouterNoise(strengths=(0.1,))])
    assert found.table("first").splitlines()[0].split() == (
        ["shift", "strength", "quality", "drop", "load", "moved", "entropy"]
    )
    assert len(found.table().splitlines()) == 4
    assert [part.splitlines()[0] for part in str(found).split("\n\n")] == [
        "mean of 2 layers",
        "first",
        "second",
    ]
    with pytest.raises(ValueError, match=r"no routed layer 'third'; there are \['first', 'second'\]"):
        found.table("third")


def test_quality_under_shift_is_recorded_and_judged(trained, tmp_path):
    optimizer = torch.optim.Adam(trained.parameters())
    with sp.watch(trained, optimizer, tmp_path / "run") as watch:
        sp.stress(trained, [data(256, 900)], watch=watch)
    history = sp.load_run(tmp_path / "run")
    assert history.get("stress/quality").last > 0.8
    assert {"noise", "feature permutation", "router noise"} < set(history.places("stress/quality"))
    assert "expert off first[0]" in history.places("stress/quality")
    for finding in diagnose(history):
        assert finding.rule == "falls_under_shift"


def test_images_are_blurred_and_sparse_models_have_no_paths():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sp.sparsify(model, optimizer, density=0.5, method=sp.static())
    x = torch.randn(32, 1, 8, 8)
    found = sp.stress(model, [(x, model(x).argmax(1))])
    assert found.clean.quality == 1.0
    assert {row.shift for row in found.rows} == {"none", "noise", "blur", "feature permutation"}
    assert "entropy" not in str(found)
    flat = torch.ones(2, 3, 8, 8)
    torch.testing.assert_close(shifts.blur(flat, 1.0, 0), flat)
    assert shifts.blur(x, 1.0, 0).std() < x.std() / 2


def test_tokens_are_corrupted_to_the_share_asked_for():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    ids = torch.randint(50, (8, 64))
    found = sp.stress(model, [(ids, model(ids).argmax(-1))])
    rows = {row.strength: row for row in found.rows if row.shift == "token corruption"}
    assert set(rows) == {"0.05", "0.15", "0.3"}
    changed = (shifts.corrupt_tokens(ids, 0.3, 1) != ids).float().mean()
    assert 0.2 < changed < 0.35


def test_a_permutation_moves_every_chosen_feature_and_is_one_for_all_rows():
    x = torch.arange(20.0).expand(4, 20)
    moved = shifts.permute_features(x, 0.25, 3)
    assert (moved != x).sum(1).tolist() == [5] * 4
    assert moved.unique(dim=0).shape[0] == 1
    assert moved[0].sort().values.equal(x[0])


def test_the_experts_of_other_libraries_fall_silent_in_turn():
    model, adapters = foreign()
    x = torch.randn(256, 8)
    block = model["block"]

    def quality(model, batch):
        y = block(batch[0])
        return float((y.abs().sum(-1) > 0).float().mean())

    before = copy.deepcopy(model.state_dict())
    found = sp.stress(model, [(x, x)], quality=quality, shifts=[shifts.ExpertOff()], adapters=adapters)
    share = torch.bincount(block.gate(x).argmax(-1), minlength=4) / 256
    assert [row.drop for row in found.rows[1:]] == pytest.approx(share.tolist())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_bad_input_is_refused(trained):
    with pytest.raises(ValueError, match="no batches"):
        sp.stress(trained, [])
    with pytest.raises(ValueError, match=r"expected batches \(input, target\)"):
        sp.stress(trained, [torch.randn(4, 12)])
