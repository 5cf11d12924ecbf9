"""Measuring: who was used, who was updated, how evenly, since when."""
