"""What happens to a run besides training: copies, evaluation, freezing, failures, letting go."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dst.common import assert_same
from tests.dst.test_loops import RIGL, STEPS, data, loss_of, mlp


def test_deepcopy_of_all_three_goes_on_alone_and_the_same():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
    for step in range(15):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    frozen = copy.deepcopy(model.state_dict())
    twins = copy.deepcopy((model, optimizer, sparse))
    for step in range(15, STEPS):
        twins[1].zero_grad()
        loss_of(twins[0], step).backward()
        twins[1].step()
    assert_same(model.state_dict(), frozen)
    assert sparse.step == 15
    for step in range(15, STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert_same(model.state_dict(), twins[0].state_dict())
    assert_same(sparse.state_dict(), twins[2].state_dict())


def test_deepcopy_of_the_model_alone_is_a_plain_model():
    model = mlp()
    sparse = sp.sparsify(model, density=0.3, method=sp.static())
    twin = copy.deepcopy(model)
    assert_same(model.state_dict(), twin.state_dict())
    loss_of(twin, 0).backward()
    assert twin[0].weight.grad[~sparse.topologies["0"].mask()].any(), "the copy's gradient is masked"


def test_eval_and_inference_change_nothing():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
    before = copy.deepcopy((model.state_dict(), sparse.state_dict()))
    model.eval()
    with torch.no_grad():
        loss_of(model, 0)
    with torch.inference_mode():
        loss_of(model, 0)
    model.train()
    assert_same(model.state_dict(), before[0])
    assert_same(sparse.state_dict(), before[1])


def test_a_frozen_layer_is_left_as_it_is_and_one_frozen_later_keeps_its_topology():
    model = mlp()
    model[0].requires_grad_(False)
    weights = model[0].weight.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
    assert list(sparse.layers) == ["2", "4"]
    for step in range(25):
        if step == 12:
            model[2].requires_grad_(False)
            still = (sparse.topologies["2"], model[2].weight.clone())
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert torch.equal(model[0].weight, weights)
    assert sparse.topologies["2"].same_as(still[0])
    assert torch.equal(model[2].weight, still[1])


def test_a_frozen_layer_that_is_named_is_sparse_and_learns_when_unfrozen():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL), include=["*"])
    assert "0" not in sparse.layers, "a pattern does not reach a frozen layer"
    sparse.densify()
    sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL), include=["0", "2"])
    first = sparse.topologies["0"]
    for step in range(25):
        if step == 11:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        assert not model[0].weight[~sparse.topologies["0"].mask()].any()
    assert not sparse.topologies["0"].same_as(first)


def test_an_exception_inside_the_loop_does_no_harm():
    """A failure before the step, caught by the user: what follows is as if it had not been."""
    runs = []
    for fails in (False, True):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        sparse = sp.sparsify(model, optimizer, density=0.3, method=sp.rigl(**RIGL))
        for step in range(STEPS):
            if fails and step in (10, 15):
                with contextlib.suppress(RuntimeError):
                    optimizer.zero_grad()
                    loss_of(model, step + 100).backward()
                    raise RuntimeError
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        runs.append((model, sparse))
    assert_same(runs[0][0].state_dict(), runs[1][0].state_dict())
    assert_same(runs[0][1].state_dict(), runs[1][1].state_dict())


def test_attach_later_detach_and_densify():
    model = mlp()
    sparse = sp.sparsify(model, density=0.3, method=sp.rigl(**RIGL))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert sparse.attach(optimizer) is sparse
    with pytest.raises(ValueError, match=r"attached .* already"):
        sparse.attach(optimizer)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert sparse.step == 12
    sparse.detach()
    optimizer.step()
    assert sparse.step == 12
    mask = sparse.topologies["0"].mask()
    dense = sparse.densify()
    assert dense is model
    assert not model[0].weight[~mask].any()
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    assert model[0].weight[~mask].any(), "a densified model still trains under its mask"


def test_the_model_can_change_dtype_after_it_was_sparsified():
    model = mlp()
    sparse = sp.sparsify(model, density=0.3, method=sp.rigl(**RIGL))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparse.attach(optimizer)
    for step in range(15):
        x, y = data(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    assert sparse.updates == 1
    assert not model[0].weight[~sparse.topologies["0"].mask()].any()
