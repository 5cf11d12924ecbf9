"""What a call costs apart from arithmetic: forward + backward of a tiny layer, dense and compressed.

python benchmarks/call_cost.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from sparsight.nn.linear import SparseLinear
from sparsight.topology import Topology


def microseconds(call: Callable[[], object], repeats: int = 20, calls: int = 200) -> float:
    """The quickest of several rounds."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - begin) / calls)
    return 1e6 * best


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dense = nn.Linear(32, 32)
    sparse = SparseLinear.from_dense(dense, Topology.from_mask(torch.rand(32, 32) < 0.1))
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    for name, layer in (("dense", dense), ("compressed", sparse)):
        leaves = [x, *layer.parameters()]

        def both(layer: nn.Module = layer, leaves: list[torch.Tensor] = leaves) -> None:
            for leaf in leaves:
                leaf.grad = None
            layer(x).backward(dy)

        forward = microseconds(lambda layer=layer: layer(x))  # type: ignore[misc]
        print(f"{name:>10}: forward {forward:.0f} µs, forward + backward {microseconds(both):.0f} µs")


if __name__ == "__main__":
    main()
