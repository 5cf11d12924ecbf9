"""Upcycling: the dense feed-forward blocks of a trained model become experts (Komatsuzaki et al., 2023)."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sparsight.moe.activations import by_name
from sparsight.moe.estimators import Estimator, GatingOnly
from sparsight.moe.experts import GLU, MLP
from sparsight.moe.layer import MoE
from sparsight.moe.routers import Router

Match = str | Callable[[str, nn.Module], bool] | None
_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def upcycle(
    model: nn.Module,
    *,
    experts: int,
    match: Match = None,
    k: int = 2,
    noise: float = 0.0,
    router: Router | None = None,
    estimator: Estimator | None = None,
    **options: Any,
) -> list[str]:
    """Replace feed-forward blocks by MoE layers whose experts are copies of them; returns their names.

    `match` is a pattern of module names ("*.mlp") or a function (name, module) → bool; None takes every
    block that is recognised: torch's Transformer layers, gate/up/down blocks (Llama, Mistral, Qwen, Gemma
    ...), in/out blocks (GPT-2, OPT-like, T5) and Sequential(Linear, activation, Linear). A block of another
    kind that `match` names is copied as it is. `noise` adds that share of each weight's standard deviation
    to all experts but the first. With `noise=0` and gates that add up to 1 (the default for k ≥ 2) the
    model's output stays the same. `options` go to `MoE`.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    >>> x = torch.randn(4, 8)
    >>> before = model(x)
    >>> upcycle(model, experts=4)
    ['0']
    >>> torch.allclose(model(x), before, atol=1e-6)
    True
    """
    if not noise >= 0:
        raise ValueError(f"upcycle: noise must be a number >= 0, got {noise}")
    found = _find(model, match)
    if estimator is None and (router is None or router.select is None):
        estimator = GatingOnly(normalise=k > 1)
    if "causal" not in options:
        options["causal"] = _is_causal(model)
    made = {
        name: _layer(name, module, experts, k, noise, router, estimator, options)
        for name, module in found.items()
    }
    for name, moe in made.items():
        _put(model, name, found[name], moe)
    return list(made)


def _find(model: nn.Module, match: Match) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or outer == "" for outer in found):
            continue
        if match is None:
            hit = isinstance(module, _TORCH_LAYERS) or _plain_form(module) is not None
        else:
            hit = fnmatchcase(name, match) if isinstance(match, str) else match(name, module)
        if hit and not isinstance(module, MoE):
            found[name] = module
    if not found:
        names = [name for name, _ in model.named_modules() if name]
        near = difflib.get_close_matches(str(match), names, n=3, cutoff=0.3) if match else names[:5]
        what = "no feed-forward block is recognised" if match is None else f"match={match!r} finds no module"
        raise ValueError(f"upcycle: {what}; did you mean {near}?")
    if "" in found:
        raise ValueError("upcycle: the model itself is the block; wrap it, so that it can be replaced inside")
    return found


def _is_causal(model: nn.Module) -> bool | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    if getattr(config, "is_decoder", False) or type(model).__name__.endswith("ForCausalLM"):
        return True
    return None


def _layer(
    name: str,
    module: nn.Module,
    experts: int,
    k: int,
    noise: float,
    router: Router | None,
    estimator: Estimator | None,
    options: dict[str, Any],
) -> MoE:
    block: nn.Module = _plain_form(module) or copy.deepcopy(module)
    dim, hidden = _widths(name, block)
    made = iter(range(10**9))

    def expert(dim: int, hidden: int) -> nn.Module:
        twin = copy.deepcopy(block)
        if noise and next(made) > 0:
            _disturb(twin, noise)
        return twin

    like = next(block.parameters())
    moe = MoE(
        dim,
        hidden,
        experts,
        k,
        router=router,
        estimator=estimator,
        expert=expert,
        name=name,
        **options,
    )
    return moe.to(like.device).train(module.training)


@torch.no_grad()
def _disturb(expert: nn.Module, noise: float) -> None:
    for p in expert.parameters():
        if p.dim() > 1:
            p.add_(torch.randn_like(p) * noise * p.std())


def _widths(name: str, block: nn.Module) -> tuple[int, int]:
    if isinstance(block, (MLP, GLU)):
        return block.down.out_features, block.down.in_features
    linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(
            f"upcycle: '{name}' ({type(block).__name__}) has no Linear layer to tell its widths by"
        )
    return linears[-1].out_features, linears[-1].in_features


# -- recognising blocks ----------------------------------------------------------------------------


def _plain_form(module: nn.Module) -> MLP | GLU | None:
    """The block as one of our experts with its weights, if it is nothing else than that."""
    if isinstance(module, _TORCH_LAYERS):
        return _mlp(module.linear1, module.linear2, module.activation, module.dropout.p)
    if isinstance(module, nn.Sequential) and len(module) == 3:
        return _mlp(module[0], module[2], module[1], 0.0)
    children = dict(module.named_children())
    act = next((getattr(module, a) for a in ("act_fn", "act", "activation_fn") if hasattr(module, a)), None)
    drop = max((m.p for m in children.values() if isinstance(m, nn.Dropout)), default=0.0)
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo")):
        if {gate, up, down} <= children.keys():
            return _glu(children[gate], children[up], children[down], act, drop)
    # A dropout after the last product has no place in our experts, so such a block is copied as it is.
    for first, last in (
        ("fc1", "fc2"),
        ("wi", "wo"),
        ("up_proj", "down_proj"),
        ("dense_h_to_4h", "dense_4h_to_h"),
    ):
        if {first, last} <= children.keys() and not drop:
            return _mlp(children[first], children[last], act, 0.0)
    if {"c_fc", "c_proj"} <= children.keys() and not drop:
        return _mlp(_linear(children["c_fc"]), _linear(children["c_proj"]), act, 0.0)
    return None


def _linear(module: nn.Module) -> nn.Module:
    """GPT-2's Conv1D is a Linear with its weight the other way round."""
    if type(module).__name__ != "Conv1D" or not isinstance(module.weight, Tensor):
        return module
    fan_in, fan_out = module.weight.shape
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
    linear.weight = nn.Parameter(module.weight.detach().t().contiguous())
    assert isinstance(module.bias, Tensor)
    linear.bias = nn.Parameter(module.bias.detach().clone())
    return linear


def _activation_name(act: Any) -> str | None:
    """Which of our activations this is, told by what it does."""
    if act is None or not callable(act):
        return None
    x = torch.linspace(-4, 4, 101)
    try:
        y = act(x)
    except (RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    for name in ("silu", "relu", "gelu", "gelu_tanh"):
        if torch.allclose(y, by_name(name).plain(x), atol=1e-6):
            return name
    return None


def _mlp(first: nn.Module, last: nn.Module, act: Any, dropout: float) -> MLP | None:
    name = _activation_name(act)
    if name is None or type(first) is not nn.Linear or type(last) is not nn.Linear:
        return None
    if (first.bias is None) != (last.bias is None) or first.in_features != last.out_features:
        return None
    made = MLP(2, 2, activation=name, bias=first.bias is not None, dropout=dropout)
    made.up, made.down = copy.deepcopy(first), copy.deepcopy(last)
    return made


def _glu(gate: nn.Module, up: nn.Module, down: nn.Module, act: Any, dropout: float) -> GLU | None:
    name = _activation_name(act)
    if name is None or not all(type(m) is nn.Linear for m in (gate, up, down)):
        return None
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    biased = [m.bias is not None for m in (gate, up, down)]
    if any(biased) != all(biased):
        return None
    made = GLU(2, 2, activation=name, bias=all(biased), dropout=dropout)
    joined = nn.utils.skip_init(nn.Linear, gate.in_features, 2 * gate.out_features, bias=all(biased))
    joined.weight = nn.Parameter(torch.cat([gate.weight.detach(), up.weight.detach()]))
    if all(biased):
        joined.bias = nn.Parameter(torch.cat([gate.bias.detach(), up.bias.detach()]))
    made.gate_up, made.down = joined, copy.deepcopy(down)
    return made


def _same(x: Tensor) -> Tensor:
    return x


def _put(model: nn.Module, name: str, old: nn.Module, moe: MoE) -> None:
    if not isinstance(old, _TORCH_LAYERS):
        model.set_submodule(name, moe)
        return
    # torch's layer has no block of its own for the feed-forward part: the MoE stands in for the first Linear,
    # and the rest of the part lets it through. The inner dropout moved into the experts.
    old.linear1, old.linear2 = moe, nn.Identity()  # type: ignore[assignment]
    old.activation, old.dropout = _same, nn.Dropout(0.0)
    if isinstance(old, nn.TransformerEncoderLayer):
        old.activation_relu_or_gelu = 0  # the fused inference path reads linear1.weight
