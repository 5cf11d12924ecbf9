"""Sparse paths: a router sends each token through a few experts. The parts are modules of this package."""

from sparsight.moe import balancers, capacity, estimators, gates, oracle, routers, rules, selections

__all__ = ["balancers", "capacity", "estimators", "gates", "oracle", "routers", "rules", "selections"]
