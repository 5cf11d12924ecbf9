"""`sp.watch`: one line that begins to watch a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sparsight.dynamics import subject
from sparsight.dynamics.hugging_face import hugging_face
from sparsight.dynamics.routes import Adapter, routed
from sparsight.dynamics.store import FILE, Store, StoreError
from sparsight.dynamics.watch import Sink, Watch


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    run: str | Path,
    *,
    every: int = 10,
    adapters: Sequence[Adapter] = (),
    sinks: Sequence[Sink] = (),
    config: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Watch:
    """Watch a model's dynamics while your own loop trains it. Nothing else has to change.

    Every `every` optimizer steps a reading is written to `run`/run.sqlite: what docs/dynamics.md lists, for
    the sparse layers, routed layers and dense layers it finds. Call it after `sp.sparsify`. Where the folder
    holds a run already, the new one goes beside it (name-2, name-3 …: `watch.run`) unless `resume` is set:
    then it goes on after its last step, or after the one of `watch.load_state_dict`.

    >>> import sparsight as sp, tempfile
    >>> moe = sp.MoE(8, 16, experts=4)
    >>> optimizer = torch.optim.Adam(moe.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with sp.watch(moe, optimizer, f"{folder}/first", every=2) as watch:
    ...         for _ in range(4):
    ...             loss = moe(torch.randn(32, 8)).square().mean()
    ...             optimizer.zero_grad()
    ...             loss.backward()
    ...             optimizer.step()
    ...             watch.log(loss=loss)
    ...     history = sp.load_run(f"{folder}/first")
    >>> history.get("moe/tokens_per_expert", history.places("moe/load_cv")[0]).values.sum(1).tolist()
    [64.0, 64.0]
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"watch: expected a model and its optimizer, got {type(model).__name__} and "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"watch: every must be a number of steps >= 1, got {every!r}")
    store = Store(_folder(Path(run), resume)) if _first_process() else None
    try:
        made = Watch(
            model,
            optimizer,
            store,
            every=every,
            adapters=(*adapters, routed, hugging_face),
            sinks=sinks if store is not None else (),
            config=config or {},
        )
    except BaseException:
        if store is not None:
            store.close()
        raise
    if resume:
        made.go_on()
    if not made.routes and made.sparsifier is None:
        warnings.warn(
            "watch: nothing in this model is sparse (no sp.sparsify on this optimizer, no routed layer); "
            f"watching {subject.said(made.routes, None, made._layers)}: update frequency, gradient norms and "
            "effective learning rate",
            UserWarning,
            stacklevel=2,
        )
    return made


def _first_process() -> bool:
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _folder(run: Path, resume: bool) -> Path:
    """The folder to write to: `run` itself, or the first free one beside it."""
    if run.is_file():
        raise StoreError(f"{run} is a file; expected the name of a folder for the run")
    if resume:
        if not (run / FILE).is_file():
            raise StoreError(f"{run} has no run to resume: {FILE} is not there")
        return run
    folder, number = run, 1
    while (folder / FILE).exists():
        number += 1
        folder = run.with_name(f"{run.name}-{number}")
    return folder
