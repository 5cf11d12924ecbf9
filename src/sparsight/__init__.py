"""Sparsight: sparse training in PyTorch, with its learning kept in view.

Names are imported on first use, so that `sparsight --help` answers without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from sparsight.nn.conv import SparseConv2d
    from sparsight.nn.linear import SparseLinear
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
    "SparseConv2d": "sparsight.nn.conv",
    "SparseLinear": "sparsight.nn.linear",
    "Topology": "sparsight.topology",
}

__all__ = [
    "DenseMomentum",
    "Flops",
    "Latent",
    "LayerView",
    "Method",
    "SparseConv2d",
    "SparseLinear",
    "Sparsifier",
    "Topology",
    "acdc",
    "block",
    "by_name",
    "constant",
    "cosine",
    "criteria",
    "cubic",
    "distributions",
    "er",
    "erk",
    "every",
    "exponential",
    "gmp",
    "granet",
    "grasp",
    "initial",
    "itop",
    "linear",
    "lottery_ticket",
    "mest",
    "nm",
    "prune",
    "rigl",
    "schedules",
    "set_",
    "snfs",
    "snip",
    "sparsify",
    "srigl",
    "static",
    "structures",
    "top_kast",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsight' has no attribute '{name}'")
    home = import_module(_HOME[name])
    value = getattr(home, name, None) or import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
