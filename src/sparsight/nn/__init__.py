"""Weights that live on a Topology."""
