"""Every chart of a run, in the order of the page: pure functions from a history to a Plotly figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import plotly.graph_objects as go

from sparsight.dynamics.history import History
from sparsight.report.figures import cost, events, learning, look, paths, weights

EVENTS = "Findings and actions"
SECTIONS = (EVENTS, "Learning", "Sparse paths", "Sparse weights", "Cost", "All layers")


@dataclass(frozen=True)
class Chart:
    """A chart: what it shows, how to read it, which records it needs, and how it is drawn.

    `choose` names the records where they are not known before.
    """

    id: str
    section: str
    title: str
    note: str
    needs: tuple[str, ...]
    draw: Callable[..., go.Figure | None]
    layered: bool = False
    """Whether `draw` takes a layer."""
    over_steps: bool = True
    wide: bool = False
    choose: Callable[[str], bool] | None = None

    def wants(self, name: str) -> bool:
        """Whether it draws this quantity."""
        return name in self.needs if self.choose is None else self.choose(name)

    def figure(self, history: History, layer: str | None = None) -> go.Figure | None:
        """The figure with its markers; None where the run has nothing for it."""
        figure = self.draw(history, layer) if self.layered else self.draw(history)
        if figure is not None and self.over_steps:
            events.mark(figure, history.events)
        return figure


CHARTS: tuple[Chart, ...] = (
    Chart(
        "timeline",
        EVENTS,
        "When",
        "Every chart below carries the same markers.",
        (),
        events.timeline,
        wide=True,
    ),
    Chart(
        "loss",
        "Learning",
        "Loss",
        "What was logged and should fall.",
        (),
        learning.loss,
        choose=learning.is_logged_loss,
    ),
    Chart(
        "quality",
        "Learning",
        "Quality",
        "What was logged and should rise.",
        (),
        learning.quality,
        choose=learning.is_quality,
    ),
    Chart(
        "load",
        "Sparse paths",
        "Load of every expert",
        "1 is an even share; dark experts starve. The slider goes back in time.",
        (paths.TOKENS,),
        paths.load,
        over_steps=False,
        wide=True,
    ),
    Chart(
        "load_layer",
        "Sparse paths",
        "Load of one layer over time",
        "Each row is an expert.",
        (paths.TOKENS,),
        paths.load_layer,
        layered=True,
    ),
    Chart(
        "entropy",
        "Sparse paths",
        "Token and load entropy",
        "Both low is collapse; tokens low and load high is specialisation.",
        ("moe/router_entropy", "moe/load_entropy"),
        paths.entropy,
    ),
    Chart(
        "experts",
        "Sparse paths",
        "Dead experts and dropped tokens",
        "Both should stay near zero.",
        ("moe/dead_expert_frac", "moe/drop_rate"),
        paths.experts,
    ),
    Chart(
        "overload",
        "Sparse paths",
        "Overloaded experts",
        "The busiest expert of each layer; 0 is balance.",
        ("moe/max_vio",),
        paths.overload,
    ),
    Chart(
        "gate",
        "Sparse paths",
        "Gate saturation",
        "A saturated gate (top probability over 0.99) barely learns.",
        ("moe/gate_saturation", "moe/gate_top1_prob", "moe/singleton_frac"),
        paths.gate,
    ),
    Chart(
        "expert_updates",
        "Sparse paths",
        "How often experts learn",
        "Experts far left are starved.",
        ("moe/update_freq",),
        paths.expert_updates,
        over_steps=False,
    ),
    Chart(
        "mutual",
        "Sparse paths",
        "What the token tells about the expert",
        "Near 0, routing ignores the token.",
        ("moe/routing_mi",),
        paths.mutual,
    ),
    Chart(
        "similarity",
        "Sparse paths",
        "Likeness of experts",
        "At 1 they are copies of each other.",
        ("moe/similarity", "moe/output_similarity"),
        paths.similarity,
    ),
    Chart(
        "depth",
        "Sparse paths",
        "Tokens around blocks",
        "Blocks that some tokens skip.",
        ("depth/taken", "depth/gate_mean", "depth/gate_saturation"),
        paths.depth,
    ),
    Chart(
        "density", "Sparse weights", "Density", "Weights that exist.", ("sparse/density",), weights.density
    ),
    Chart(
        "churn",
        "Sparse weights",
        "Churn",
        "Weights that the last update replaced.",
        ("sparse/churn",),
        weights.churn,
    ),
    Chart(
        "survival",
        "Sparse weights",
        "Survival",
        "Grown weights that still exist, by age.",
        ("sparse/survival",),
        weights.survival,
        over_steps=False,
    ),
    Chart(
        "itop", "Sparse weights", "ITOP rate", "Positions tried so far.", ("sparse/itop_rate",), weights.itop
    ),
    Chart(
        "topology",
        "Sparse weights",
        "Topology of a layer",
        "How dense the weights are, cell by cell. The slider goes back in time.",
        (weights.MAP,),
        weights.topology,
        layered=True,
        over_steps=False,
    ),
    Chart(
        "updates",
        "Sparse weights",
        "How often weights learn",
        "Weights far left are starved.",
        ("sparse/update_freq",),
        weights.updates,
        over_steps=False,
    ),
    Chart(
        "dead",
        "Sparse weights",
        "Dead neurons",
        "They cost nothing and do nothing.",
        ("sparse/dead_neurons", "sparse/dead_inputs"),
        weights.dead,
    ),
    Chart(
        "flops", "Cost", "FLOPs saved", "Below the dotted line is saved.", ("sparse/flops_ratio",), cost.flops
    ),
    Chart("pace", "Cost", "Time", "How long one optimizer step takes.", ("run/step_seconds",), cost.pace),
    Chart(
        "effective_lr",
        "All layers",
        "Effective learning rate",
        "How far weights move for the learning rate.",
        ("sparse/effective_lr", "dense/effective_lr"),
        weights.effective_lr,
    ),
    Chart(
        "grad_norm",
        "All layers",
        "Gradient norm",
        "By layer.",
        ("sparse/grad_norm", "dense/grad_norm"),
        weights.grad_norm,
    ),
)


def available(names: Iterable[str], *, any_event: bool = False) -> list[Chart]:
    """The charts for which a run has records."""
    known = list(names)
    return [c for c in CHARTS if (any_event if c.section == EVENTS else any(map(c.wants, known)))]


def titled(figure: go.Figure, chart: Chart) -> go.Figure:
    """With its title inside, for places that have no headings of their own."""
    return figure.update_layout(title_text=chart.title, margin_t=(figure.layout.margin.t or 0) + 34)


__all__ = ["CHARTS", "EVENTS", "SECTIONS", "Chart", "available", "look", "titled"]
