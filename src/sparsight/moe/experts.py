"""Experts: MLP and GLU. Each is an ordinary module with ordinary Linear layers, so `sparsify` works in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsight.moe.activations import Activation, by_name

Factory = Callable[[int, int], nn.Module]


def _untouched(linear: nn.Module) -> bool:
    """Whether a layer is a Linear and nothing has been hung on it that a plain product would pass over."""
    return type(linear) is nn.Linear and not (
        linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    )


class MLP(nn.Module):
    """y = W₂·act(W₁x).

    >>> MLP(8, 16)(torch.zeros(3, 8)).shape
    torch.Size([3, 8])
    """

    gated = False

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "gelu",
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = dropout
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        by_name(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        hidden = by_name(self.activation).plain(self.up(x))
        return self.down(nn.functional.dropout(hidden, self.dropout, self.training))  # type: ignore[no-any-return]

    def parts(self) -> tuple[nn.Linear, nn.Linear] | None:
        """The layer in and the layer out, where two products and an activation are all there is."""
        return _parts(self, self.up, self.down)


class GLU(nn.Module):
    """y = W₂·(act(Wg·x) ⊙ Wu·x), with Wg and Wu as the halves of one matrix (Shazeer, 2020).

    >>> GLU(8, 16).gate_up.weight.shape
    torch.Size([32, 8])
    """

    gated = True

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = dropout
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        by_name(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        hidden = by_name(self.activation).plain(gate) * up
        return self.down(nn.functional.dropout(hidden, self.dropout, self.training))  # type: ignore[no-any-return]

    def parts(self) -> tuple[nn.Linear, nn.Linear] | None:
        """The layer in and the layer out, where two products and an activation are all there is."""
        return _parts(self, self.gate_up, self.down)


def _parts(expert: MLP | GLU, first: nn.Linear, last: nn.Linear) -> tuple[nn.Linear, nn.Linear] | None:
    if expert.dropout and expert.training:
        return None
    if not (_untouched(first) and _untouched(last)) or expert._forward_hooks or expert._forward_pre_hooks:
        return None
    return first, last


@dataclass(frozen=True)
class Plain:
    """Experts of one kind whose matrices are all there is to them."""

    activation: Activation
    gated: bool
    layers: list[tuple[nn.Linear, nn.Linear]]


def plain_form(experts: nn.ModuleList) -> Plain | None:
    """The experts' matrices, if every expert is of one plain kind, else None."""
    kind = None
    layers = []
    for expert in experts:
        if not isinstance(expert, (MLP, GLU)):
            return None
        parts = expert.parts()
        if parts is None or kind not in (None, (expert.activation, expert.gated)):
            return None
        kind = expert.activation, expert.gated
        layers.append(parts)
    return None if kind is None else Plain(by_name(kind[0]), kind[1], layers)


def build_experts(expert: str | Factory, dim: int, hidden: int, count: int) -> nn.ModuleList:
    """`count` experts, each with its own initial weights."""
    if expert == "mlp":
        return nn.ModuleList(MLP(dim, hidden) for _ in range(count))
    if expert == "glu":
        return nn.ModuleList(GLU(dim, hidden) for _ in range(count))
    if not callable(expert):
        raise ValueError(f"expert must be 'mlp', 'glu' or a function (dim, hidden) -> module, got {expert!r}")
    built = nn.ModuleList(expert(dim, hidden) for _ in range(count))
    _check_built(built, dim, hidden)
    return built


def _check_built(experts: nn.ModuleList, dim: int, hidden: int) -> None:
    shapes = [tuple(p.shape) for p in experts[0].parameters()]
    widths = {size for shape in shapes for size in shape}
    if shapes and not widths & {hidden, 2 * hidden, 3 * hidden}:
        raise ValueError(
            f"the expert factory was asked for hidden={hidden} and ignored it: its parameters have the "
            f"shapes {shapes}. Use the second argument, or pass the width that the factory has"
        )
    if len({id(p) for expert in experts for p in expert.parameters()}) < len(shapes) * len(experts):
        raise ValueError("the expert factory returns experts that share parameters; build new ones each call")
    mode = experts[0].training
    experts[0].eval()
    with torch.no_grad():
        like = next(experts[0].parameters(), torch.empty(0))
        probe = torch.zeros(2, dim, dtype=like.dtype, device=like.device)
        try:
            shape = tuple(experts[0](probe).shape)
        except RuntimeError as error:
            raise ValueError(
                f"the expert factory's module does not take inputs of width {dim}: {error}"
            ) from None
    experts[0].train(mode)
    if shape != (2, dim):
        raise ValueError(
            f"an expert must map [N, {dim}] to [N, {dim}]; the factory's maps it to {list(shape)}"
        )
