"""Speed and memory, measured as ratios to dense torch in one process. `sparsight bench` runs it all."""
