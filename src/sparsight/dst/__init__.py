"""Sparse weights: criteria, distributions, schedules, structures, and the methods made of them."""
