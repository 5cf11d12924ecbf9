"""Sparsight: sparse training in PyTorch, with its learning kept in view.

Names are imported on first use, so that `sparsight --help` answers without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsight import moe, recipes
    from sparsight.dst import criteria, distributions, initial, schedules, structures
    from sparsight.dst.distributions import by_name, er, erk, uniform
    from sparsight.dst.flops import Flops
    from sparsight.dst.method import DenseMomentum, Latent, Method
    from sparsight.dst.methods import (
        acdc,
        block,
        gmp,
        granet,
        grasp,
        itop,
        mest,
        nm,
        rigl,
        set_,
        snfs,
        snip,
        srigl,
        static,
        top_kast,
    )
    from sparsight.dst.prune import lottery_ticket, prune
    from sparsight.dst.schedules import constant, cosine, cubic, every, exponential, linear
    from sparsight.dst.sparsifier import Sparsifier
    from sparsight.dst.sparsify import sparsify
    from sparsight.dst.view import LayerView
    from sparsight.dynamics import sinks
    from sparsight.dynamics.begin import watch
    from sparsight.dynamics.reading import load_run
    from sparsight.dynamics.routes import Part, Route, where_logits
    from sparsight.dynamics.watch import Watch
    from sparsight.health import actions, policies
    from sparsight.health.diagnose import Episode, compare_runs, diagnose, replay
    from sparsight.health.findings import Finding
    from sparsight.health.manage import manage
    from sparsight.health.manager import Manager
    from sparsight.health.stress import Stress, stress
    from sparsight.health.verdict import verdict
    from sparsight.moe import routers
    from sparsight.moe.balancers import EntropyLoss, ImportanceLoss, LossFreeBias, SwitchLoss, ZLoss
    from sparsight.moe.capacity import Capacity
    from sparsight.moe.dense import DefaultMoE, DenseMixer, GumbelStraightThrough, Reinforce, StraightThrough
    from sparsight.moe.depth import MixtureOfDepths
    from sparsight.moe.estimators import GatingOnly, Quadrature
    from sparsight.moe.experts import GLU, MLP
    from sparsight.moe.gates import Mask
    from sparsight.moe.layer import MoE
    from sparsight.moe.model import balance_loss, follow_steps, reinforce_loss
    from sparsight.moe.pool import Pool
    from sparsight.moe.routers import Router
    from sparsight.moe.routing import Routing
    from sparsight.moe.rules import (
        SparseMixer,
        SparseMixer2,
        SparseMixer2Star,
        euler,
        gauss2,
        gauss3,
        heun3,
        lobatto,
        midpoint,
        radau,
        simpson,
    )
    from sparsight.moe.upcycle import upcycle
    from sparsight.nn.conv import SparseConv2d
    from sparsight.nn.linear import SparseLinear
    from sparsight.recipes.training import Training
    from sparsight.report.show import show
    from sparsight.topology import Topology

__version__ = "0.1.0"

_HOME = {
    "criteria": "sparsight.dst",
    "distributions": "sparsight.dst",
    "initial": "sparsight.dst",
    "schedules": "sparsight.dst",
    "structures": "sparsight.dst",
    "by_name": "sparsight.dst.distributions",
    "er": "sparsight.dst.distributions",
    "erk": "sparsight.dst.distributions",
    "uniform": "sparsight.dst.distributions",
    "Flops": "sparsight.dst.flops",
    "DenseMomentum": "sparsight.dst.method",
    "Latent": "sparsight.dst.method",
    "Method": "sparsight.dst.method",
    "acdc": "sparsight.dst.methods",
    "block": "sparsight.dst.methods",
    "gmp": "sparsight.dst.methods",
    "granet": "sparsight.dst.methods",
    "grasp": "sparsight.dst.methods",
    "itop": "sparsight.dst.methods",
    "mest": "sparsight.dst.methods",
    "nm": "sparsight.dst.methods",
    "rigl": "sparsight.dst.methods",
    "set_": "sparsight.dst.methods",
    "snfs": "sparsight.dst.methods",
    "snip": "sparsight.dst.methods",
    "srigl": "sparsight.dst.methods",
    "static": "sparsight.dst.methods",
    "top_kast": "sparsight.dst.methods",
    "lottery_ticket": "sparsight.dst.prune",
    "prune": "sparsight.dst.prune",
    "constant": "sparsight.dst.schedules",
    "cosine": "sparsight.dst.schedules",
    "cubic": "sparsight.dst.schedules",
    "every": "sparsight.dst.schedules",
    "exponential": "sparsight.dst.schedules",
    "linear": "sparsight.dst.schedules",
    "Sparsifier": "sparsight.dst.sparsifier",
    "sparsify": "sparsight.dst.sparsify",
    "LayerView": "sparsight.dst.view",
    "sinks": "sparsight.dynamics",
    "watch": "sparsight.dynamics.begin",
    "load_run": "sparsight.dynamics.reading",
    "Part": "sparsight.dynamics.routes",
    "Episode": "sparsight.health.diagnose",
    "compare_runs": "sparsight.health.diagnose",
    "diagnose": "sparsight.health.diagnose",
    "replay": "sparsight.health.diagnose",
    "Finding": "sparsight.health.findings",
    "verdict": "sparsight.health.verdict",
    "Route": "sparsight.dynamics.routes",
    "where_logits": "sparsight.dynamics.routes",
    "Watch": "sparsight.dynamics.watch",
    "actions": "sparsight.health",
    "policies": "sparsight.health",
    "Manager": "sparsight.health.manager",
    "manage": "sparsight.health.manage",
    "Stress": "sparsight.health.stress",
    "stress": "sparsight.health.stress",
    "SparseConv2d": "sparsight.nn.conv",
    "SparseLinear": "sparsight.nn.linear",
    "moe": "sparsight.moe",
    "routers": "sparsight.moe",
    "EntropyLoss": "sparsight.moe.balancers",
    "ImportanceLoss": "sparsight.moe.balancers",
    "LossFreeBias": "sparsight.moe.balancers",
    "SwitchLoss": "sparsight.moe.balancers",
    "ZLoss": "sparsight.moe.balancers",
    "Capacity": "sparsight.moe.capacity",
    "DefaultMoE": "sparsight.moe.dense",
    "DenseMixer": "sparsight.moe.dense",
    "GumbelStraightThrough": "sparsight.moe.dense",
    "Reinforce": "sparsight.moe.dense",
    "StraightThrough": "sparsight.moe.dense",
    "MixtureOfDepths": "sparsight.moe.depth",
    "GatingOnly": "sparsight.moe.estimators",
    "Quadrature": "sparsight.moe.estimators",
    "GLU": "sparsight.moe.experts",
    "MLP": "sparsight.moe.experts",
    "Mask": "sparsight.moe.gates",
    "MoE": "sparsight.moe.layer",
    "balance_loss": "sparsight.moe.model",
    "follow_steps": "sparsight.moe.model",
    "reinforce_loss": "sparsight.moe.model",
    "Pool": "sparsight.moe.pool",
    "Router": "sparsight.moe.routers",
    "Routing": "sparsight.moe.routing",
    "SparseMixer": "sparsight.moe.rules",
    "SparseMixer2": "sparsight.moe.rules",
    "SparseMixer2Star": "sparsight.moe.rules",
    "euler": "sparsight.moe.rules",
    "gauss2": "sparsight.moe.rules",
    "gauss3": "sparsight.moe.rules",
    "heun3": "sparsight.moe.rules",
    "lobatto": "sparsight.moe.rules",
    "midpoint": "sparsight.moe.rules",
    "radau": "sparsight.moe.rules",
    "simpson": "sparsight.moe.rules",
    "upcycle": "sparsight.moe.upcycle",
    "recipes": "sparsight.recipes",
    "Training": "sparsight.recipes.training",
    "show": "sparsight.report.show",
    "Topology": "sparsight.topology",
}

__all__ = [
    "GLU",
    "MLP",
    "Capacity",
    "DefaultMoE",
    "DenseMixer",
    "DenseMomentum",
    "EntropyLoss",
    "Episode",
    "Finding",
    "Flops",
    "GatingOnly",
    "GumbelStraightThrough",
    "ImportanceLoss",
    "Latent",
    "LayerView",
    "LossFreeBias",
    "Manager",
    "Mask",
    "Method",
    "MixtureOfDepths",
    "MoE",
    "Part",
    "Pool",
    "Quadrature",
    "Reinforce",
    "Route",
    "Router",
    "Routing",
    "SparseConv2d",
    "SparseLinear",
    "SparseMixer",
    "SparseMixer2",
    "SparseMixer2Star",
    "Sparsifier",
    "StraightThrough",
    "Stress",
    "SwitchLoss",
    "Topology",
    "Training",
    "Watch",
    "ZLoss",
    "acdc",
    "actions",
    "balance_loss",
    "block",
    "by_name",
    "compare_runs",
    "constant",
    "cosine",
    "criteria",
    "cubic",
    "diagnose",
    "distributions",
    "er",
    "erk",
    "euler",
    "every",
    "exponential",
    "follow_steps",
    "gauss2",
    "gauss3",
    "gmp",
    "granet",
    "grasp",
    "heun3",
    "initial",
    "itop",
    "linear",
    "load_run",
    "lobatto",
    "lottery_ticket",
    "manage",
    "mest",
    "midpoint",
    "moe",
    "nm",
    "policies",
    "prune",
    "radau",
    "recipes",
    "reinforce_loss",
    "replay",
    "rigl",
    "routers",
    "schedules",
    "set_",
    "show",
    "simpson",
    "sinks",
    "snfs",
    "snip",
    "sparsify",
    "srigl",
    "static",
    "stress",
    "structures",
    "top_kast",
    "uniform",
    "upcycle",
    "verdict",
    "watch",
    "where_logits",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsight' has no attribute '{name}'")
    home = import_module(_HOME[name])
    if home.__name__ == f"sparsight.{name}":
        value = home
    else:
        value = getattr(home, name, None) or import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
