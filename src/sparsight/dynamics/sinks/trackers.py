"""Records for the trackers people already look at: TensorBoard, Weights & Biases, MLflow.

Numbers of the whole model by default; `layers=True` for those of each layer, and for vectors, which are
histograms with one bar for each expert. Each package is imported when its sink opens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsight.dynamics.records import Event, Record
from sparsight.dynamics.sinks.files import shown

WIDEST = 512
"""Vectors wider than this are pictures (a layer's topology) and not for these."""


def _need(module: str, package: str, sink: str) -> None:
    """Say at once, and not at the first record, that a package is not there; do not import it yet."""
    if find_spec(module) is None:
        raise ImportError(f"sinks.{sink} needs {package}: pip install {package}")


def _split(
    records: Sequence[Record], layers: bool
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """Numbers and vectors by their paths; what is not finite is left out of the one and 0 in the other."""
    numbers, vectors = {}, {}
    for record in shown(records, layers):
        if not isinstance(record.value, np.ndarray):
            numbers[record.path] = float(record.value)
        elif record.value.size <= WIDEST:
            vectors[record.path] = np.nan_to_num(record.value.astype(np.float64), posinf=0.0, neginf=0.0)
    return numbers, vectors


def _by_step(records: Sequence[Record]) -> dict[int, list[Record]]:
    steps: dict[int, list[Record]] = {}
    for record in records:
        steps.setdefault(record.step, []).append(record)
    return steps


class TensorBoard:
    """Event files in a folder: scalars, histograms, and events as text."""

    def __init__(self, folder: str | Path, *, layers: bool = False) -> None:
        _need("tensorboard", "tensorboard", "TensorBoard")
        self.folder, self.layers = Path(folder), layers
        self._writer: Any = None

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(self.folder))
        return self._writer

    def write(self, records: Sequence[Record]) -> None:
        for step, some in _by_step(records).items():
            numbers, vectors = _split(some, self.layers)
            for path, number in numbers.items():
                self._open().add_scalar(path, number, step)
            for path, vector in vectors.items():
                self._histogram(path, vector, step)

    def _histogram(self, path: str, vector: NDArray[np.float64], step: int) -> None:
        index = np.arange(len(vector)) + 0.5
        self._open().add_histogram_raw(
            path,
            min=0.0,
            max=float(len(vector)),
            num=float(vector.sum()),
            sum=float(vector @ index),
            sum_squares=float(vector @ index**2),
            bucket_limits=np.arange(1, len(vector) + 1, dtype=np.float64).tolist(),
            bucket_counts=vector.tolist(),
            global_step=step,
        )

    def event(self, event: Event) -> None:
        place = f"**{event.where}** " if event.where else ""
        self._open().add_text(f"events/{event.kind}", f"{event.severity}: {place}{event.message}", event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """A run of Weights & Biases: the one you give, or a new one made with `options` of `wandb.init`.

    The optimizer's step is logged as `step` and is the x axis. A run that was made here is finished here.
    """

    def __init__(self, run: Any = None, *, layers: bool = False, **options: Any) -> None:
        if run is not None and options:
            raise ValueError(f"sinks.WandB: a run was given, so {sorted(options)} can have no effect")
        _need("wandb", "wandb", "WandB")
        self.layers = layers
        self._given, self._options = run, options
        self._run: Any = None

    def _open(self) -> Any:
        if self._run is None:
            self._run = self._given or import_module("wandb").init(**self._options)
            self._run.define_metric("step", hidden=True)
            for family in ("moe", "depth", "sparse", "dense", "log", "run", "events"):
                self._run.define_metric(f"{family}/*", step_metric="step")
        return self._run

    def write(self, records: Sequence[Record]) -> None:
        for step, some in _by_step(records).items():
            numbers, vectors = _split(some, self.layers)
            told: dict[str, Any] = dict(numbers)
            if vectors:
                histogram = import_module("wandb").Histogram
                told |= {p: histogram(np_histogram=(v, np.arange(len(v) + 1))) for p, v in vectors.items()}
            if told:
                self._open().log({"step": step, **told})

    def event(self, event: Event) -> None:
        text = f"{event.severity}: {event.where + ': ' if event.where else ''}{event.message}"
        self._open().log({"step": event.step, f"events/{event.kind}": text})

    def close(self) -> None:
        if self._run is not None and self._given is None:
            self._run.finish()
        self._run = None


class MLflow:
    """A run of MLflow at `uri` (where MLFLOW_TRACKING_URI says, if not given): metrics, and events as tags.

    MLflow has no histograms: with `layers=True` a vector is a metric for each of its numbers.
    """

    def __init__(
        self,
        experiment: str = "sparsight",
        *,
        uri: str | None = None,
        name: str | None = None,
        layers: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        _need("mlflow", "mlflow-skinny", "MLflow")
        self.experiment, self.uri, self.name, self.layers = experiment, uri, name, layers
        self.tags = dict(tags or {})
        self.run_id: str | None = None
        self._client: Any = None

    def _open(self) -> Any:
        if self._client is None:
            client = import_module("mlflow").MlflowClient(tracking_uri=self.uri)
            known = client.get_experiment_by_name(self.experiment)
            home = client.create_experiment(self.experiment) if known is None else known.experiment_id
            self.run_id = client.create_run(home, run_name=self.name, tags=self.tags).info.run_id
            self._client = client
        return self._client

    def write(self, records: Sequence[Record]) -> None:
        now = int(time.time() * 1000)
        told = []
        for step, some in _by_step(records).items():
            numbers, vectors = _split(some, self.layers)
            numbers |= {f"{p}/{i}": v for p, vector in vectors.items() for i, v in enumerate(vector.tolist())}
            told += [(path, value, step) for path, value in numbers.items() if math.isfinite(value)]
        metric = import_module("mlflow.entities").Metric
        for first in range(0, len(told), 1000):  # as many as one request may hold
            batch = [metric(path, value, now, step) for path, value, step in told[first : first + 1000]]
            self._open().log_batch(self.run_id, metrics=batch)

    def event(self, event: Event) -> None:
        text = f"{event.severity}: {event.where + ': ' if event.where else ''}{event.message}"
        client = self._open()
        client.set_tag(self.run_id, f"event.{event.step}.{event.kind}.{event.rule}", text[:5000])

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self.run_id)
            self._client = None
