"""Single layers: sparse against dense, masked and torch.sparse CSR, forward and forward + backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.bench.measure import Ratio, by_turns, ratio
from sparsight.nn.linear import SparseLinear

Call = Callable[[], object]


@dataclass(frozen=True)
class LinearShape:
    """A linear layer and the batch it sees."""

    batch: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"B{self.batch} {self.inputs}→{self.outputs}"


@dataclass(frozen=True)
class ConvShape:
    """A 3×3 convolution of stride 1 that keeps its size."""

    batch: int
    channels: int
    side: int

    def __str__(self) -> str:
        return f"B{self.batch} conv 3×3 {self.channels}→{self.channels} on {self.side}×{self.side}"


LINEAR = [
    LinearShape(128, 512, 256),
    LinearShape(128, 1024, 1024),
    LinearShape(512, 1024, 1024),
    LinearShape(1024, 768, 3072),
    LinearShape(1024, 3072, 768),
    LinearShape(2048, 256, 1024),
    LinearShape(100, 333, 77),
]
ODD = LINEAR[-1]
CONV = [ConvShape(32, 64, 32), ConvShape(32, 128, 16)]


@dataclass(frozen=True)
class Row:
    """One line of the table: how much faster than dense each candidate was."""

    what: str
    shape: str
    sparsity: float
    threads: int
    ratios: dict[str, Ratio]


class _Csr(nn.Module):
    """What torch itself offers: a CSR weight whose values learn."""

    def __init__(self, dense: nn.Linear, topology: sp.Topology) -> None:
        super().__init__()
        self.values = nn.Parameter(dense.weight.detach().flatten()[topology.positions()].clone())
        self.bias = dense.bias
        self.topology = topology

    def forward(self, x: Tensor) -> Tensor:
        top = self.topology
        weight = torch.sparse_csr_tensor(top.crow, top.col, self.values, top.shape)
        return (weight @ x.T).T + self.bias


def sparsified(dense: nn.Module, storage: str, sparsity: float, block: tuple[int, int] | None) -> nn.Module:
    """A copy of a layer with so many weights missing at random, or in blocks."""
    model = nn.Sequential(copy.deepcopy(dense))
    method = sp.static() if block is None else sp.block(*block, steps=1000)
    sp.sparsify(
        model,
        density=1 - sparsity,
        method=method,
        storage=storage,  # type: ignore[arg-type]
        distribution=sp.uniform(first_dense=False),
    )
    return model[0]  # the layer by itself, as the dense one is


def linear_rows(
    shape: LinearShape, sparsity: float, threads: int, *, repeats: int, blocks: bool = True
) -> list[Row]:
    """Forward and forward + backward of one linear layer."""
    torch.manual_seed(0)
    dense = nn.Linear(shape.inputs, shape.outputs)
    x = torch.randn(shape.batch, shape.inputs)
    models: dict[str, nn.Module] = {
        "dense": dense,
        "compressed": sparsified(dense, "compressed", sparsity, None),
        "masked": sparsified(dense, "masked", sparsity, None),
    }
    for rows in (4, 8) if blocks else ():
        if shape.outputs % rows == 0:
            models[f"block {rows}×1"] = sparsified(dense, "compressed", sparsity, (rows, 1))
    compressed = models["compressed"]
    assert isinstance(compressed, SparseLinear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's sparse CSR announces itself as beta
        models["torch CSR"] = _Csr(dense, compressed.topology)
        models["torch CSR"](x[:1])
    return _rows(str(shape), sparsity, threads, models, x, repeats)


def conv_rows(shape: ConvShape, sparsity: float, threads: int, *, repeats: int) -> list[Row]:
    """Forward and forward + backward of one convolution."""
    torch.manual_seed(0)
    dense = nn.Conv2d(shape.channels, shape.channels, 3, padding=1)
    x = torch.randn(shape.batch, shape.channels, shape.side, shape.side)
    models: dict[str, nn.Module] = {
        "dense": dense,
        "compressed": sparsified(dense, "compressed", sparsity, None),
        "masked": sparsified(dense, "masked", sparsity, None),
    }
    return _rows(str(shape), sparsity, threads, models, x, repeats)


def _rows(
    shape: str, sparsity: float, threads: int, models: dict[str, nn.Module], x: Tensor, repeats: int
) -> list[Row]:
    rows = []
    for what, make in (("forward", _forward), ("forward+backward", both_ways)):
        times = by_turns({name: make(model, x) for name, model in models.items()}, repeats=repeats)
        ratios = {name: ratio(times["dense"], own) for name, own in times.items() if name != "dense"}
        rows.append(Row(what, shape, sparsity, threads, ratios))
    return rows


def _forward(model: nn.Module, x: Tensor) -> Call:
    def call() -> None:
        with torch.no_grad():
            model(x)

    return call


def both_ways(model: nn.Module, x: Tensor) -> Call:
    """Forward and backward, to inputs and parameters."""
    own = x.clone().requires_grad_()
    dy = torch.randn_like(model(own))
    leaves = [own, *model.parameters()]

    def call() -> None:
        for leaf in leaves:  # or gradients would be added up
            leaf.grad = None
        model(own).backward(dy)

    return call
