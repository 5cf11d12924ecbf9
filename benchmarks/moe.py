"""Mixture of experts against a dense block of the same FLOPs, and beside transformers' Mixtral block.

    python benchmarks/moe.py                    # every table
    python benchmarks/moe.py --threads 1 --repeats 40 --only blocks

All contenders run interleaved in one process: each repeat times every one of them once, forward and
backward, and the ratio is taken within a repeat, so that a busy machine slows both sides. Shown are the
median ratio, and the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.moe.dispatch import plan

SIZES = [  # tokens, dim, hidden, experts, k, goal
    (2048, 256, 512, 8, 1, 1.12),
    (2048, 256, 512, 64, 1, 1.80),
    (1024, 512, 1024, 8, 1, 1.12),
    (1024, 512, 1024, 32, 2, 1.35),
]
ESTIMATORS = {
    "sampled": sp.GatingOnly(sample=True),
    "midpoint": sp.midpoint,
    "heun3": sp.heun3,
    "gauss3": sp.gauss3,
    "SparseMixer": sp.SparseMixer(),
    "SparseMixer2": sp.SparseMixer2(),
    "SparseMixer2Star": sp.SparseMixer2Star(),
    "Reinforce": sp.Reinforce(),
    "DefaultMoE": sp.DefaultMoE(),
}


class DenseGLU(nn.Module):
    """The block that every ratio is taken against."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def mixtral(dim: int, hidden: int, experts: int, k: int, form: str) -> nn.Module | None:
    """transformers' block, or None where transformers is not installed."""
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    config = MixtralConfig(
        hidden_size=dim, intermediate_size=hidden, num_local_experts=experts, num_experts_per_tok=k
    )
    config._experts_implementation = form
    block = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.02)
    return block.train()


def step(block: nn.Module, x: Tensor, seed: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    begin = time.perf_counter()
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(seed)
    spent = time.perf_counter() - begin
    del y
    block.zero_grad()
    x.grad = None
    return spent


def race(blocks: dict[str, nn.Module], x: Tensor, repeats: int) -> dict[str, list[float]]:
    """Times of each, interleaved."""
    seed = torch.randn_like(x)
    for _ in range(3):
        for block in blocks.values():
            step(block, x, seed)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(repeats):
        for name, block in blocks.items():
            times[name].append(step(block, x, seed))
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of the ratios within a repeat."""
    each = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    return statistics.median(each), each[len(each) // 10], each[-1 - len(each) // 10]


def blocks(repeats: int, eager: bool) -> None:
    """MoE and Mixtral against the dense block."""
    print(f"{'size':28} {'goal':>5}  {'sparsight':>18} {'grouped_mm':>18} {'eager':>18}  dense ms")
    for tokens, dim, hidden, experts, k, goal in SIZES:
        torch.manual_seed(0)
        contenders: dict[str, nn.Module] = {
            "dense": DenseGLU(dim, hidden * k),
            "sparsight": sp.MoE(dim, hidden, experts, k, expert="glu"),
        }
        for form in ("grouped_mm", "eager") if eager else ("grouped_mm",):
            block = mixtral(dim, hidden, experts, k, form)
            if block is not None:
                contenders[form] = block
        # transformers' block wants a batch dimension.
        x = torch.randn(1, tokens, dim, requires_grad=True)
        times = race(contenders, x, repeats)
        cells = []
        for name in ("sparsight", "grouped_mm", "eager"):
            known = name in times
            cells.append("{:.2f} ({:.2f}-{:.2f})".format(*ratio(times, name, "dense")) if known else "-")
        dense = statistics.median(times["dense"]) * 1e3
        size = f"T{tokens} d{dim} h{hidden} E{experts} k{k}"
        print(f"{size:28} {goal:5.2f}  {cells[0]:>18} {cells[1]:>18} {cells[2]:>18}  {dense:.1f}", flush=True)


def estimators(repeats: int) -> None:
    """Each estimator against plain top-1, in the same layer and with the same number of tokens an expert.

    Dense estimators (StraightThrough, GumbelStraightThrough, DenseMixer) run every expert and are not here.
    """
    for tokens, dim, hidden, experts, k, _ in SIZES[:3]:
        torch.manual_seed(0)
        made: dict[str, nn.Module] = {"top-1": sp.MoE(dim, hidden, experts, k, expert="glu")}
        for name, estimator in ESTIMATORS.items():
            made[name] = sp.MoE(dim, hidden, experts, k, expert="glu", estimator=estimator)
        for block in made.values():  # the same weights, and so the same load where the choice is the same
            block.load_state_dict(made["top-1"].state_dict(), strict=False)
        times = race(made, torch.randn(tokens, dim, requires_grad=True), repeats)
        print(f"T{tokens} d{dim} h{hidden} E{experts} k{k}, against plain top-1:")
        for name in ESTIMATORS:
            print(
                f"  {name:18} {{:.3f}} ({{:.3f}}-{{:.3f}})".format(*ratio(times, name, "top-1")), flush=True
            )


def routing(repeats: int) -> None:
    """What routing alone costs, as experts grow: logits, choice and sort, forward and backward."""
    counts = [8, 16, 32, 64, 128, 256]
    x = torch.randn(2048, 256, requires_grad=True)

    def route(layer: sp.MoE) -> Callable[[], None]:
        def run() -> None:
            made = layer.estimator(
                layer.router(x), 1, score=layer.router_kind.score, bias=None, training=True
            )
            plan(made.token, made.expert, made.tokens, made.experts)
            made.weight.sum().backward()

        return run

    for name, estimator in (("top-1", None), ("SparseMixer", sp.SparseMixer())):
        runs = {e: route(sp.MoE(256, 8, e, estimator=estimator)) for e in counts}
        times: dict[int, list[float]] = {e: [] for e in counts}
        for _ in range(repeats + 3):
            for e, run in runs.items():
                begin = time.perf_counter()
                run()
                times[e].append(time.perf_counter() - begin)
        row = "  ".join(f"E{e} {statistics.median(times[e][3:]) * 1e3:.2f}" for e in counts)
        print(f"routing of 2048 tokens, ms, {name:12} {row}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--only", choices=["blocks", "estimators", "routing"])
    parser.add_argument("--eager", action="store_true", help="also transformers' eager block, which is slow")
    args = parser.parse_args()
    for threads in dict.fromkeys(args.threads):
        torch.set_num_threads(threads)
        print(f"-- {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}")
        if args.only in (None, "blocks"):
            blocks(args.repeats, args.eager)
        if args.only in (None, "estimators"):
            estimators(args.repeats)
        if args.only in (None, "routing"):
            routing(args.repeats)


if __name__ == "__main__":
    main()
