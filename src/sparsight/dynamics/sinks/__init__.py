"""Where records go besides the store: `sp.watch(…, sinks=[sp.sinks.TensorBoard("logs")])`.

Each opens at its first record, so one that is made on every process of a run costs nothing on the others.
"""

from sparsight.dynamics.sinks.files import CSV, JSONL, export
from sparsight.dynamics.sinks.trackers import MLflow, TensorBoard, WandB

__all__ = ["CSV", "JSONL", "MLflow", "TensorBoard", "WandB", "export"]
