"""From dense layers to compressed ones and back, in a model and in its optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from sparsight.kernels import native
from sparsight.kernels.layout import layout_of
from sparsight.nn.compressed import CompressedWeight
from sparsight.nn.conv import SparseConv2d, padding_of
from sparsight.nn.layer import SparseLayer
from sparsight.nn.linear import SparseLinear
from sparsight.topology import Topology

DENSEST = 0.35
"""Above this density a compressed layer gains nothing over a dense one (docs/performance.md)."""
SMALLEST = 16384
"""Below this many positions the call costs more than the arithmetic."""


def why_not(model: nn.Module, module: nn.Module, attribute: str) -> str | None:
    """Why this weight cannot be compressed; None where it can."""
    if attribute != "weight" or type(module) not in (nn.Linear, nn.Conv2d):
        return f"no kernel for {type(module).__name__}.{attribute}"
    if isinstance(module, nn.Conv2d) and (module.groups != 1 or padding_of(module) is None):
        return f"no kernel for a convolution with groups={module.groups}, padding={module.padding!r}"
    if module is model:
        return "the model is this one layer, and a layer cannot replace itself"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "hooks are attached to the module"
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.device.type != "cpu":
        return f"on {weight.device.type}: the kernels run on the CPU"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"no kernel for {str(weight.dtype).removeprefix('torch.')}"
    return None


def why_no_gain(topology: Topology) -> str | None:
    """Why compressing would not pay; None where it does."""
    if not native.available():
        return "the native kernels are not built"
    if topology.density > DENSEST:
        return f"density above {DENSEST}"
    if topology.size < SMALLEST:
        return f"fewer than {SMALLEST} positions"
    return None


def compress(
    model: nn.Module,
    layers: list[nn.Linear | nn.Conv2d],
    topology: Topology,
    optimizer: Optimizer | None,
) -> CompressedWeight:
    """Put sparse layers in the place of dense ones that share one weight."""
    dense = layers[0].weight
    positions, layout = topology.positions(), layout_of(topology)

    def gathered(tensor: Tensor) -> Tensor:
        return layout.stored(tensor.detach().reshape(-1)[positions])

    values = Parameter(gathered(dense).clone(), dense.requires_grad)
    modules: list[SparseLayer] = []
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            modules.append(SparseConv2d.like(layer, topology, values))
        else:
            modules.append(SparseLinear(topology, values, layer.bias).train(layer.training))
        _replace_module(model, layer, modules[-1])
    if optimizer is not None:
        _swap_parameter(optimizer, dense, values, gathered)
    return CompressedWeight(modules)


def decompress(model: nn.Module, weight: CompressedWeight, optimizer: Optimizer | None) -> None:
    """Put dense layers, zero where no weight existed, in the place of sparse ones that share one weight."""
    topology, layout = weight.topology, weight.modules[0].layout

    def spread(stored: Tensor) -> Tensor:
        flat = stored.new_zeros(topology.size)
        flat[topology.positions()] = layout.by_position(stored.detach())
        return flat.view(topology.shape)

    dense = Parameter(spread(weight.param), weight.param.requires_grad)
    for module in weight.modules:
        assert isinstance(module, SparseLinear | SparseConv2d)
        layer = module.to_dense()
        layer.weight = dense
        _replace_module(model, module, layer)
    if optimizer is not None:
        _swap_parameter(optimizer, weight.param, dense, spread)


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is old:
                module._modules[name] = new


def _swap_parameter(
    optimizer: Optimizer, old: Tensor, new: Parameter, convert: Callable[[Tensor], Tensor]
) -> None:
    """Give the optimizer `new` in the place of `old`, with the state of the weights that both have."""
    for group in optimizer.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = {
            key: convert(slot).clone() if isinstance(slot, Tensor) and slot.shape == old.shape else slot
            for key, slot in optimizer.state.pop(old).items()
        }
