"""Judging a run: rules over its history, their findings, and what to do about them."""
