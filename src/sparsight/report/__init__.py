"""Showing: figures, one-file reports, comparisons, and a page that follows a run. Reads the store alone."""
