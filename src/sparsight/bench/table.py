"""Running everything, printing one table, storing it, and drawing the picture."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sparsight.bench.layers import CONV, LINEAR, ODD, Row, conv_rows, linear_rows
from sparsight.bench.measure import threads as with_threads
from sparsight.bench.moe import MoERow, moe_rows, render_moe
from sparsight.bench.training import Memory, Updates, memory, step_row, updates
from sparsight.dst.summary import text_table
from sparsight.kernels import native


@dataclass(frozen=True)
class Measured:
    """All that one run of the benchmark found; what was not asked for is empty."""

    rows: list[Row] = field(default_factory=list)
    updates: list[Updates] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    moe: list[MoERow] = field(default_factory=list)


def run(
    *, sparsities: Iterable[float], thread_counts: Iterable[int], repeats: int, say: Callable[[str], None]
) -> Measured:
    """Every row of the table of layers; `say` is told what is being measured."""
    rows: list[Row] = []
    shares: list[Updates] = []
    sparsities = list(sparsities)
    for count in thread_counts:
        with with_threads(count):
            for sparsity in sparsities:
                for shape in LINEAR:
                    say(f"{count} thread(s), {100 * sparsity:g} %, {shape}")
                    rows += linear_rows(shape, sparsity, count, repeats=repeats)
                for conv in CONV:
                    say(f"{count} thread(s), {100 * sparsity:g} %, {conv}")
                    rows += conv_rows(conv, sparsity, count, repeats=repeats)
                say(f"{count} thread(s), {100 * sparsity:g} %, training step")
                rows.append(step_row(sparsity, count, repeats=repeats))
                shares.append(updates(sparsity, count))
    return Measured(rows, shares, [memory(sparsity) for sparsity in sparsities])


def run_moe(*, thread_counts: Iterable[int], repeats: int, say: Callable[[str], None]) -> list[MoERow]:
    """Every row of the tables for mixtures of experts."""
    rows: list[MoERow] = []
    for count in thread_counts:
        with with_threads(count):
            rows += moe_rows(count, repeats=repeats, say=say)
    return rows


def geometric_mean(rows: Iterable[Row], candidate: str) -> float:
    """Over the medians of rows that have this candidate."""
    logs = [math.log(row.ratios[candidate].median) for row in rows if candidate in row.ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def means(rows: list[Row]) -> list[tuple[int, float, dict[str, float]]]:
    """(threads, sparsity, {candidate: geometric mean}) of forward + backward over the regular shapes."""
    regular = {str(shape) for shape in LINEAR if shape != ODD}
    out = []
    for count in sorted({row.threads for row in rows}):
        for sparsity in sorted({row.sparsity for row in rows}):
            group = [
                row
                for row in rows
                if (row.threads, row.sparsity, row.what) == (count, sparsity, "forward+backward")
                and row.shape in regular
            ]
            names = dict.fromkeys(name for row in group for name in row.ratios)
            out.append((count, sparsity, {name: geometric_mean(group, name) for name in names}))
    return out


def render(found: Measured) -> str:
    """The tables as text, of what was measured."""
    parts = [_render_layers(found)] if found.rows else [machine()]
    return "\n\n".join(parts + [render_moe(found.moe)] * bool(found.moe))


def _render_layers(found: Measured) -> str:
    rows = found.rows
    names = list(dict.fromkeys(name for row in rows for name in row.ratios))
    head = ["", "shape", "sparsity", "threads", *names]
    body = [
        [
            row.what,
            row.shape,
            f"{100 * row.sparsity:g} %",
            str(row.threads),
            *(_cell(row, name) for name in names),
        ]
        for row in rows
    ]
    averaged = means(rows)
    shown = [name for name in names if any(name in of for _, _, of in averaged)]
    summary = [
        [f"{count} thread(s)", f"{100 * sparsity:g} %", *(f"{of[name]:.2f}×" for name in shown)]
        for count, sparsity, of in averaged
    ]
    shares = [
        [f"{100 * u.sparsity:g} %", str(u.threads), f"{100 * u.share:.1f} %", f"{u.steps_an_update:.1f}"]
        for u in found.updates
    ]
    taken = [[f"{100 * m.sparsity:g} %", f"{m.share:.3f}"] for m in found.memory]
    return "\n\n".join(
        [
            f"{machine()}\nHow many times faster than dense torch: median (quartiles) of timings by turns.",
            text_table(head, body),
            "Geometric mean of forward+backward over the regular linear shapes:",
            text_table(["", "sparsity", *shown], summary),
            "RigL's updates in a run of 1,000 steps, every hundredth an update until 750:",
            text_table(["sparsity", "threads", "of the time", "the first, in ordinary steps"], shares),
            "Weights + gradients + Adam state + topology of the MLP, as a share of dense:",
            text_table(["sparsity", "memory"], taken),
        ]
    )


def _cell(row: Row, name: str) -> str:
    if name not in row.ratios:
        return ""
    value = row.ratios[name]
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def machine() -> str:
    """What this was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].split(":", 1)[1].strip() if lines else cpu
    return f"{cpu}, torch {torch.__version__}, kernels: {native.isa()}"


def save(found: Measured, folder: Path) -> list[Path]:
    """The table as text and JSON, and the picture; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / "bench.txt", folder / "bench.json"
    text.write_text(render(found) + "\n")
    data.write_text(json.dumps({"machine": machine(), **asdict(found)}, indent=1) + "\n")
    return [text, data, *([draw(found.rows, folder / "speedup.svg")] if found.rows else [])]


def draw(rows: list[Row], path: Path) -> Path:
    """Speed-up over sparsity, with the ideal 1/density."""
    from matplotlib.figure import Figure

    counts = sorted({row.threads for row in rows})
    figure = Figure(figsize=(4.6 * len(counts), 3.8), layout="constrained")
    axes = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axis, count in zip(axes, counts, strict=True):
        own = [(sparsity, of) for threads, sparsity, of in means(rows) if threads == count]
        x = [100 * sparsity for sparsity, _ in own]
        axis.plot(x, [1 / (1 - s) for s, _ in own], ":", color="gray", label="ideal, 1/density")
        for name, mark in zip(own[0][1], "o^sDv", strict=False):
            axis.plot(x, [of[name] for _, of in own], f"{mark}-", label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(yscale="log", xlabel="sparsity [%]", title=f"{count} thread(s)")
    axes[0].set_ylabel("forward+backward, times faster than dense")
    axes[-1].legend(fontsize=8)
    figure.savefig(path)
    return path
