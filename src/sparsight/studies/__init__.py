"""Experiments that answer a question: published claims, run again and reported as they come out."""
