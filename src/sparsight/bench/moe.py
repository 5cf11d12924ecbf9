"""Mixture of experts: against a dense block of the same FLOPs, beside transformers, by estimator.

Ratios here are times: 1.10 is ten per cent slower than what it is compared with.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.bench.measure import Ratio, by_turns, ratio
from sparsight.dst.summary import text_table
from sparsight.moe.dispatch import plan
from sparsight.moe.estimators import Estimator


@dataclass(frozen=True)
class MoEShape:
    """Tokens through GLU experts, and how much slower than dense they may be."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    k: int
    goal: float

    def __str__(self) -> str:
        return f"T{self.tokens} d{self.dim} h{self.hidden} E{self.experts} k{self.k}"


SHAPES = [
    MoEShape(2048, 256, 512, 8, 1, 1.12),
    MoEShape(2048, 256, 512, 64, 1, 1.80),
    MoEShape(1024, 512, 1024, 8, 1, 1.12),
    MoEShape(1024, 512, 1024, 32, 2, 1.35),
]
# Those that run every expert on every token (StraightThrough, DenseMixer ...) cost what dense costs.
ESTIMATORS: dict[str, Estimator] = {
    "sampled": sp.GatingOnly(sample=True),
    "midpoint": sp.midpoint,
    "gauss3": sp.gauss3,
    "SparseMixer": sp.SparseMixer(),
    "SparseMixer2": sp.SparseMixer2(),
    "SparseMixer2Star": sp.SparseMixer2Star(),
    "Reinforce": sp.Reinforce(),
    "DefaultMoE": sp.DefaultMoE(),
}
EXPERTS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class MoERow:
    """One line: the time of each candidate as a multiple of the baseline's, forward and backward."""

    what: str
    shape: str
    threads: int
    goal: float
    ratios: dict[str, Ratio]


class DenseGLU(nn.Module):
    """The block that the layers are compared with."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def peers_are_here() -> bool:
    """Whether transformers, whose Mixtral block is measured too, is installed."""
    return find_spec("transformers") is not None


def _mixtral(shape: MoEShape, form: str) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.k,
    )
    config._experts_implementation = form
    block: nn.Module = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    return block.train()


def _step(block: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    own = x.clone().requires_grad_()

    def call() -> None:
        own.grad = None
        block.zero_grad()
        y = block(own)
        (y[0] if isinstance(y, tuple) else y).backward(dy)

    return call


def _whole_step(moe: sp.MoE, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """With what an estimator asks of the loop: REINFORCE its loss, running means the step."""
    own = x.clone().requires_grad_()

    def call() -> None:
        own.grad = None
        moe.zero_grad()
        loss = (moe(own) * dy).sum()
        if moe.ledger.needs.loss is not None:
            loss = loss + sp.reinforce_loss(moe, loss)
        loss.backward()
        moe.after_step()

    return call


def block_row(shape: MoEShape, threads: int, *, repeats: int, seconds: float = 0.02) -> MoERow:
    """The layer and transformers' block in both its forms against the dense block."""
    torch.manual_seed(0)
    blocks: dict[str, nn.Module] = {
        "dense": DenseGLU(shape.dim, shape.hidden * shape.k),
        "sparsight": sp.MoE(shape.dim, shape.hidden, shape.experts, shape.k, expert="glu"),
    }
    if peers_are_here():
        blocks["Mixtral grouped_mm"] = _mixtral(shape, "grouped_mm")
        blocks["Mixtral eager"] = _mixtral(shape, "eager")
    x = torch.randn(1, shape.tokens, shape.dim)  # transformers' block wants a batch
    dy = torch.randn_like(x)
    calls = {name: _step(block, x, dy) for name, block in blocks.items()}
    times = by_turns(calls, repeats=repeats, seconds=seconds)
    return MoERow("block", str(shape), threads, shape.goal, _slower(times, "dense"))


def estimator_row(shape: MoEShape, threads: int, *, repeats: int, seconds: float = 0.02) -> MoERow:
    """Each estimator against plain top-1 in the same layer, with the same weights; loss and step included."""
    torch.manual_seed(0)
    made = {"top-1": sp.MoE(shape.dim, shape.hidden, shape.experts, expert="glu")}
    for name, estimator in ESTIMATORS.items():
        made[name] = sp.MoE(shape.dim, shape.hidden, shape.experts, expert="glu", estimator=estimator)
        made[name].load_state_dict(made["top-1"].state_dict(), strict=False)
    x = torch.randn(shape.tokens, shape.dim)
    dy = torch.randn_like(x)
    calls = {name: _whole_step(m, x, dy) for name, m in made.items()}
    times = by_turns(calls, repeats=repeats, seconds=seconds)
    return MoERow("estimator, against top-1", str(shape), threads, 1.05, _slower(times, "top-1"))


def routing_row(threads: int, *, repeats: int, tokens: int = 2048, dim: int = 256) -> MoERow:
    """Routing alone (logits, choice and sort, and the way back) as experts grow, against E = 8."""
    x = torch.randn(tokens, dim, requires_grad=True)

    def route(layer: sp.MoE) -> Callable[[], None]:
        def run() -> None:
            made = layer.estimator(
                layer.router(x), 1, score=layer.router_kind.score, bias=None, training=True
            )
            plan(made.token, made.expert, made.tokens, made.experts)
            made.weight.sum().backward()

        return run

    times = by_turns({f"E{e}": route(sp.MoE(dim, 8, e)) for e in EXPERTS}, repeats=repeats)
    return MoERow("routing, against E8", f"T{tokens} d{dim} k1", threads, 256 / 8, _slower(times, "E8"))


def moe_rows(threads: int, *, repeats: int, say: Callable[[str], None]) -> Iterator[MoERow]:
    """Every row for this many threads; `say` is told what is being measured."""
    for shape in SHAPES:
        say(f"{threads} thread(s), MoE {shape}")
        yield block_row(shape, threads, repeats=repeats)
    say(f"{threads} thread(s), MoE estimators {SHAPES[0]}")
    yield estimator_row(SHAPES[0], threads, repeats=repeats)
    say(f"{threads} thread(s), MoE routing")
    yield routing_row(threads, repeats=repeats)
    gc.collect()


def _slower(times: dict[str, list[float]], base: str) -> dict[str, Ratio]:
    return {name: ratio(own, times[base]) for name, own in times.items() if name != base}


def render_moe(rows: list[MoERow]) -> str:
    """The tables as text: one for each kind of row, since their candidates differ."""
    parts = [
        "Mixture of experts, forward+backward: time as a multiple of that of a dense GLU block of the same "
        "FLOPs, of plain top-1, or of 8 experts.",
    ]
    if not peers_are_here():
        parts.append("transformers is not installed, so its Mixtral block is not in the table.")
    for what in dict.fromkeys(row.what for row in rows):
        own = [row for row in rows if row.what == what]
        names = list(dict.fromkeys(name for row in own for name in row.ratios))
        body = [
            [row.shape, str(row.threads), f"{row.goal:.2f}", *(_cell(row.ratios.get(n)) for n in names)]
            for row in own
        ]
        parts.append(text_table([what, "threads", "goal", *names], body))
    return "\n\n".join(parts)


def _cell(value: Ratio | None) -> str:
    return "" if value is None else f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"
