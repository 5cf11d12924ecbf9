"""Whole runs as Python functions."""
