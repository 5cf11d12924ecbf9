"""The MoE blocks of Hugging Face transformers, told by their shape: a block with a `gate` or `router` and
`experts`. transformers itself is never imported.

The router is hooked, and what it returns is what is counted: biases on the scores, groups, sampling and
capacity have had their say by then. Most routers return (logits, weights, indices); the others are listed in
`_READERS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsight.dynamics.routes import Part, Route, Seen

Score = Callable[[Tensor], Tensor]


def hugging_face(name: str, module: nn.Module) -> Route | None:
    """An adapter for transformers' blocks: Mixtral, OLMoE, Qwen, PhiMoE, Switch, DeepSeek and their kin."""
    if not _foreign(module):
        return None
    children = dict(module.named_children())
    router = next((children[key] for key in ("gate", "router") if key in children), None)
    if router is None or not _foreign(router):
        return None
    experts = children.get("experts")
    count = _experts(router, experts)
    if count is None:
        return None
    k = _first_int(("top_k", "num_experts_per_tok", "top_k_experts"), router, module) or 1
    parts = _parts(count, [experts] if experts is not None else _others(children, router))
    return Route(
        name,
        router,
        count,
        k,
        Reader(name, count, k),
        tuple(router.parameters()),
        parts,
        _run(experts, count) if parts and experts is not None else None,
        about={"router": type(router).__name__, "estimator": "hugging face"},
        padded=True,
    )


def _foreign(module: nn.Module) -> bool:
    homes = (kind.__module__.partition(".")[0] for kind in type(module).__mro__)
    return any(home in ("transformers", "transformers_modules") for home in homes)


def _first_int(names: tuple[str, ...], *owners: Any) -> int | None:
    for owner in owners:
        for source in (owner, getattr(owner, "config", None)):
            for name in names:
                if isinstance(value := getattr(source, name, None), int):
                    return value
    return None


def _experts(router: nn.Module, experts: nn.Module | None) -> int | None:
    """How many experts there are to choose from: the rows of the router's matrix."""
    rows = [p.shape[0] for p in router.parameters() if p.dim() == 2]
    named = {
        _first_int(("num_experts", "n_routed_experts", "moe_num_experts", "total_experts"), owner)
        for owner in (router, experts)
    }
    return next((row for row in rows if row in named), None)


def _others(children: dict[str, nn.Module], router: nn.Module) -> list[nn.Module]:
    return [child for child in children.values() if child is not router]


def _parts(count: int, homes: list[nn.Module]) -> tuple[tuple[Part, ...], ...]:
    """The parameters of each expert: modules of their own, slices of one tensor, or equal blocks of rows."""
    if len(homes) == 1 and len(list(homes[0].children())) == count:
        return tuple(tuple(Part(p) for p in expert.parameters()) for expert in homes[0].children())
    params = [p for home in homes for p in home.parameters() if p.dim() > 1]
    if not params or any(p.shape[0] % count for p in params):
        return ()
    return tuple(tuple(Part(p, expert, count) for p in params) for expert in range(count))


def _run(experts: nn.Module, count: int) -> Callable[[Tensor], Tensor] | None:
    """Every expert on the same tokens, where the experts take (tokens, indices, weights)."""
    first = next(experts.parameters(), None)
    if first is None or first.dim() != 3 or getattr(type(experts).forward, "__wrapped__", None) is None:
        return None

    def run(rows: Tensor) -> Tensor:
        rows = rows.to(first.dtype)
        one = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        index = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        # `forward` and not the module: hooks of others on it are not meant for this.
        return torch.stack([experts.forward(rows, index + expert, one) for expert in range(count)])

    return run


# -- what routers return ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """A router's output, put in order."""

    logit: Tensor
    expert: Tensor
    token: Tensor
    weight: Tensor | None = None
    dropped: Tensor | None = None


def _per_token(index_Tk: Tensor) -> tuple[Tensor, Tensor]:
    token = torch.arange(len(index_Tk), device=index_Tk.device)[:, None].expand_as(index_Tk)
    return index_Tk.reshape(-1), token.reshape(-1)


def _triple(output: tuple[Any, ...], experts: int, k: int) -> Said:
    """(logits, weights, indices): nearly all of them."""
    logit, weight, index = (part.reshape(-1, part.shape[-1]) for part in output[:3])
    return Said(logit, *_per_token(index), weight.reshape(-1))


def _one_hot(output: tuple[Any, ...], experts: int, k: int) -> Said:
    """(one-hot after capacity, weight, logits): Switch. A row of zeros is a token that was dropped."""
    logit = output[2].reshape(-1, experts)
    # The router rounds its probabilities to the type of its input before it takes the largest.
    wanted = output[2].softmax(-1).to(output[1].dtype).reshape(-1, experts).argmax(-1, keepdim=True)
    lost = output[0].reshape(-1, experts).sum(-1) == 0
    return Said(logit, *_per_token(wanted), dropped=lost)


def _sorted(output: tuple[Any, ...], experts: int, k: int) -> Said:
    """(order, tokens by expert, weights, sizes, logits): JetMoE."""
    sizes = torch.as_tensor(output[3], device=output[1].device)
    return Said(output[4], torch.repeat_interleave(sizes), output[1], output[2].reshape(-1))


def _dense(output: tuple[Any, ...], experts: int, k: int) -> Said:
    """(scores with zeros where not chosen, logits): Llama 4."""
    weight, index = output[0].reshape(-1, experts).topk(k)
    return Said(output[1].reshape(-1, experts), *_per_token(index), weight.reshape(-1))


def _logits(output: tuple[Any, ...], experts: int, k: int) -> Said:
    """Logits alone: DBRX, whose block takes the k largest."""
    logit = output[0].reshape(-1, experts)
    return Said(logit, *_per_token(logit.topk(k).indices))


def _wide(part: Any, experts: int, *, real: bool = True) -> bool:
    return isinstance(part, Tensor) and part.shape[-1] == experts and part.is_floating_point() == real


_READERS: tuple[tuple[Callable[[tuple[Any, ...], int, int], bool], Callable[..., Said]], ...] = (
    (lambda o, e, k: len(o) == 5 and _wide(o[4], e) and isinstance(o[3], list), _sorted),
    (lambda o, e, k: len(o) == 3 and _wide(o[0], e, real=False) and o[1].shape[-1] == 1, _one_hot),
    (lambda o, e, k: len(o) >= 3 and _wide(o[0], e) and _wide(o[2], k, real=False), _triple),
    (lambda o, e, k: len(o) == 2 and _wide(o[0], e) and _wide(o[1], e), _dense),
    (lambda o, e, k: len(o) == 1 and _wide(o[0], e), _logits),
)


# -- from logits to probabilities ------------------------------------------------------------------


def _soft(logit: Tensor) -> Tensor:
    return logit.float().softmax(-1)


def _sqrt_softplus(logit: Tensor) -> Tensor:
    return functional.softplus(logit.float()).sqrt()


def _sigmoid(logit: Tensor) -> Tensor:
    return logit.float().sigmoid()


def _as_given(logit: Tensor) -> Tensor:
    return logit.float()


_CLEAR = 0.02
"""How far weights may be out of proportion to the scores they come from (bfloat16 rounds by half that)."""


def _score_of(said: Said, k: int) -> Score | None:
    """What turns this router's logits into scores: the weights of a token's experts are in proportion to
    them. None where these tokens do not tell."""
    logit = said.logit[:64].float()
    if bool((logit >= 0).all()) and bool(((logit.sum(-1) - 1).abs() < 1e-3).all()):
        return _as_given  # Gemma's router returns probabilities
    if said.weight is None or len(said.expert) != k * len(said.logit) or len(logit) < 2:
        return None
    order = said.token.argsort(stable=True)
    expert, weight = (part[order].reshape(-1, k)[:64] for part in (said.expert, said.weight.float()))
    off = {}
    for score in (_soft, _sigmoid, _sqrt_softplus):
        ratio = weight / score(logit).gather(1, expert).clamp_min(1e-20)
        # With one expert a token there is only the scale that all tokens share.
        ratio = ratio if k > 1 else ratio.reshape(1, -1)
        off[score] = float(((ratio.amax(-1) - ratio.amin(-1)) / ratio.mean(-1)).mean())
    best, next_best = sorted(off, key=off.__getitem__)[:2]
    return best if off[best] < _CLEAR and off[next_best] > 2 * off[best] + 1e-4 else None


class Reader:
    """Reads the output of one router."""

    def __init__(self, name: str, experts: int, k: int) -> None:
        self.name, self.experts, self.k = name, experts, k
        self._score: Score | None = None
        self._tries = 200
        self._warned = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Seen | None:
        whole = output if isinstance(output, tuple) else (output,)
        read = next((read for fits, read in _READERS if fits(whole, self.experts, self.k)), None)
        if read is None:
            self._complain(module)
            return None
        said = read(tuple(p.detach() if isinstance(p, Tensor) else p for p in whole), self.experts, self.k)
        if self._score is None and self._tries:
            self._tries -= 1
            marked = self.k == 1 and hasattr(module, "e_score_correction_bias")
            self._score = _score_of(said, self.k) or (_sigmoid if marked else None)
        logit, prob = said.logit, None
        if self._score is _as_given:
            logit = logit.float().clamp_min(1e-30).log()
        elif self._score not in (None, _soft):
            prob = self._score(logit)
        # Expert parallelism marks what another process serves with a number past the last expert.
        here = said.expert < self.experts
        lost = 0 if said.dropped is None else said.dropped[here]
        return Seen(said.expert[here], said.token[here], logit, prob, lost)

    def _complain(self, router: nn.Module) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"watch: the router of layer '{self.name}' ({type(router).__name__}) returns something this "
                "version does not understand, so its routing is not recorded; tell where its logits are with "
                "adapters=[sp.where_logits(…)]",
                UserWarning,
                stacklevel=2,
            )
