"""Whole runs as Python functions.

A recipe takes its knobs as keyword arguments and returns a `Training`; `train` drives it. Importing this
package does not import torch: the command line shows the knobs of a recipe without waiting for it.
"""

from sparsight.recipes.knobs import Paths, Weights
from sparsight.recipes.training import Tap, Training

__all__ = ["Paths", "Tap", "Training", "Weights"]
