"""Costs against counts made by hand and the published formulas."""

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.dst.flops import training_flops


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (sp.static(), 3 * 0.1),
        (sp.set_(), 3 * 0.1),
        (sp.mest(steps=1000), 3 * 0.1),
        (sp.rigl(steps=1000, every=100), (3 * 0.1 * 100 + 2 * 0.1 + 1) / 101),
        (sp.rigl(steps=1000, every=10), (3 * 0.1 * 10 + 2 * 0.1 + 1) / 11),
        (sp.snfs(steps=1000), 2 * 0.1 + 1),
        (sp.nm(2, 4), 2 * 0.1 + 1),
        (sp.top_kast(backward=0.3), 2 * 0.1 + 0.3),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_training_step_by_the_published_formulas(method, expected):
    assert training_flops(method, 0.1, 1.0, backward=0.3) == pytest.approx(expected)


def test_a_ramp_is_integrated():
    """GMP from dense to 10 %: the mean of the cubic is 1/4 over the ramp, then nothing is left of it."""
    method = sp.gmp(steps=100_000, every=100, end=0.5)
    mean_density = 0.5 * (0.1 + 0.9 / 4) + 0.5 * 0.1
    assert training_flops(method, 0.1, 1.0, start=1.0) == pytest.approx(3 * mean_density, rel=1e-3)
    acdc = sp.acdc(steps=1000, phase=100, warmup=0.1, finish=0.3)
    # 100 dense, then six phases beginning sparse (three dense), then 300 sparse.
    assert training_flops(acdc, 0.1, 1.0, start=1.0) == pytest.approx(3 * (0.4 + 0.6 * 0.1))


def test_a_convolution_counts_its_output_positions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 10))
    sparse = sp.sparsify(model, density=0.1, method=sp.static())
    conv, fc = sparse.topologies.values()
    flops = sparse.flops(torch.zeros(2, 3, 5, 5))
    assert flops.forward_dense == 2 * 2 * (25 * 8 * 27 + 2000)
    assert flops.forward == 2 * 2 * (25 * conv.nnz + fc.nnz)
    assert flops.layers == {"0": 2 * 2 * 25 * conv.nnz, "3": 2 * 2 * fc.nnz}
    assert flops.step_ratio == pytest.approx(flops.forward_ratio)


def test_layers_kept_dense_count_in_full_and_modes_are_restored():
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 10))
    model[1].eval()
    statistics = model[1].running_mean.clone()
    sparse = sp.sparsify(model, density=0.1, method=sp.static(), keep_dense=["2"], distribution={"0": 0.1})
    flops = sparse.flops(torch.ones(4, 10))
    assert flops.forward == 2 * 4 * (20 + 200)
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(model[1].running_mean, statistics)
    assert flops.forward_ratio == sparse.flops().forward_ratio, "an MLP's ratio needs no inputs"


def test_a_transformer_layer_counts_its_attention():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    sparse = sp.sparsify(model, density=0.5, method=sp.static())
    tokens = 3 * 7
    expected = 2 * tokens * (3 * 16 * 16 + 16 * 16 + 2 * 16 * 32)
    flops = sparse.flops(torch.zeros(3, 7, 16))
    assert flops.forward_dense == expected
    assert flops.forward == 2 * tokens * sum(t.nnz for t in sparse.topologies.values())


def test_the_summary_is_a_table(capsys):
    model = nn.Sequential()
    model.up, model.down = nn.Linear(16, 32), nn.Linear(32, 16)
    sparse = sp.sparsify(model, density=0.25, method=sp.rigl(steps=1000))
    sparse.summary()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "shape", "weights", "density", "FLOPs", "storage", "because"]
    assert lines[2].split()[:8] == ["up", "32×16", "128", "/", "512", "0.2500", "256", "masked"]
    assert "rigl: density 0.2500" in lines[4]
    assert "forward 0.250" in lines[5]
