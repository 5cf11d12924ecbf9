"""Adapters of one's own, for modules that nobody here has heard of."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dynamics.common import batches, recorded

E, DIM = 4, 8


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Own(nn.Module):
    """Someone's block: a gate, experts in one tensor, and a bias on the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, DIM, DIM) * 0.3)
        self.bias = torch.tensor([0.0, 0.0, 0.0, 9.0])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gate(x)
        chosen = (logits + self.bias).topk(2).indices
        weight = logits.softmax(-1).gather(-1, chosen)
        y = torch.einsum("...k,...kde,...d->...e", weight, self.experts[chosen], x)
        return {"y": y, "logits": logits, "chosen": chosen}


def test_where_logits_makes_an_adapter_for_a_module_of_ones_own(tmp_path: Path):
    model = Own()
    optimizer = sgd(model)
    adapter = sp.where_logits(
        lambda name, module: isinstance(module, Own),
        lambda module, output: output["logits"],
        k=2,
        chosen=lambda module, output: output["chosen"],
        parts=lambda module: [[sp.Part(module.experts, e)] for e in range(E)],
    )
    x = batches(1, 3, 5, DIM)[0]
    with sp.watch(model, optimizer, tmp_path / "run", every=1, adapters=[adapter]) as watch:
        output = model(x)
        output["y"].square().mean().backward()
        norms = model.experts.grad.flatten(1).norm(dim=1).numpy()
        optimizer.step()
        history = recorded(watch)
    by_hand = np.bincount(output["chosen"].reshape(-1).numpy(), minlength=E)
    assert history.get("moe/tokens_per_expert", "model").last.tolist() == by_hand.tolist()
    assert by_hand[3] == 15  # the bias has its way with each of them
    np.testing.assert_allclose(history.get("moe/grad_norm", "model").last, norms, rtol=1e-5)
    p = output["logits"].detach().softmax(-1)
    assert history.get("moe/gate_top1_prob", "model").last == pytest.approx(
        p.amax(-1).mean().item(), rel=1e-5
    )


def test_an_adapter_that_cannot_tell_the_number_of_experts_says_so(tmp_path: Path):
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    adapter = sp.where_logits(lambda name, module: name == "0", lambda module, output: output)
    with pytest.raises(ValueError, match=r"'0' \(ReLU\) has no matrix to tell the number of experts by"):
        sp.watch(model, sgd(model), tmp_path / "run", adapters=[adapter])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sp.watch(model, sgd(model), tmp_path / "run", resume=True).close()  # the store was let go
