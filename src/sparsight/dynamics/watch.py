"""Watch: reads a model's dynamics while the user's own loop trains it, and writes them to the run's store."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsight.dst.sparsifier import Sparsifier
from sparsight.dynamics import subject
from sparsight.dynamics.about import about_run
from sparsight.dynamics.connections import Connections
from sparsight.dynamics.cost import Cost
from sparsight.dynamics.hooks import Hook, Padding
from sparsight.dynamics.learning import PathLearning, learning_rates, mean_cosine
from sparsight.dynamics.records import Event, Record
from sparsight.dynamics.routes import Adapter, Route, find_routes
from sparsight.dynamics.store import Store
from sparsight.dynamics.traffic import Traffic
from sparsight.moe.balancers import world_sum
from sparsight.moe.ledger import recomputing

OUTPUTS_EVERY = 10
"""Readings between two looks at the experts' outputs."""
_PROBE_ROWS = 32
_PATIENCE = 500


class Sink(Protocol):
    """Where records go besides the store."""

    def write(self, records: Sequence[Record]) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Watch:
    """Made by `watch`. It follows the optimizer's steps and takes a reading at every `every`-th."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        store: Store | None,
        *,
        every: int,
        adapters: Iterable[Adapter],
        sinks: Sequence[Sink],
        config: Mapping[str, Any],
    ) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self.store = store
        self.sinks: list[Sink] = list(sinks)
        self.step = 0
        self.routes = find_routes(model, adapters)
        self.sparsifier: Sparsifier | None = subject.sparsifier_of(optimizer)
        self.connections = None if self.sparsifier is None else Connections(self.sparsifier)
        self._cost = None if self.sparsifier is None else Cost(model, self.sparsifier, self.routes)
        self._traffic = {route.name: Traffic(route) for route in self.routes}
        compressed = subject.compressed(self.sparsifier)
        self._paths = [PathLearning(route, compressed) for route in self.routes]
        self._layers = subject.layers_of(model, self.routes, self.sparsifier)
        self._rows: dict[str, Tensor] = {}
        self._began = self._last = time.perf_counter()
        self._readings = 0
        self._passes = 0
        self._complained: set[str] = set()
        self._hooks = {
            route.name: route.module.register_forward_hook(Hook(self._hook(route)), with_kwargs=True)
            for route in self.routes
        }
        self._padding = Padding(model, self.routes)
        self._handles: list[Any] = [
            *self._padding.handles,
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if store is not None:
            layers = subject.describe(self.routes, self.sparsifier, self._layers)
            method = None if self.sparsifier is None else subject.describe_method(self.sparsifier)
            parameters = sum(p.numel() for p in model.parameters())
            store.describe(
                **about_run(), every=every, layers=layers, method=method, parameters=parameters,
                config=dict(config), optimizer=type(optimizer).__name__,
            )  # fmt: skip
            store.flush()

    @property
    def run(self) -> Path | None:
        """The run's folder; None on all processes but the first."""
        return None if self.store is None else self.store.folder

    # -- what the user says --------------------------------------------------------------------

    def log(self, **numbers: Any) -> None:
        """Add one's own numbers at this step: `watch.log(loss=loss, accuracy=0.93)`."""
        found = []
        for name, value in numbers.items():
            try:
                told = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                size = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"watch.log: {name} must be one number, got {size}") from None
            found.append(Record(self.step, f"log/{name}", "", told))
        self._emit(found)

    def losses(self, losses: Tensor) -> None:
        """Tell the loss of every token (or sequence) of the last forward pass, before the optimizer's step:
        the experts that served it are then judged by it. Layers that saw other tokens (those of an encoder,
        where the losses are the decoder's) are left out; where none fits, that is an error."""
        if not self._reading_next():
            return
        served = [traffic for traffic in self._traffic.values() if traffic.latest]
        fitting = sum(traffic.serve(losses) for traffic in served)
        if served and not fitting:
            raise ValueError(
                f"watch.losses: got {losses.numel()} losses, and no routed layer saw as many tokens or "
                f"sequences: {', '.join(f'{t.route.name} saw {t.tokens}' for t in served)}"
            )

    def note(self, message: str) -> None:
        """A remark on the run's timeline."""
        self.event(Event(self.step, "note", "note", "info", "", message))

    def event(self, event: Event) -> None:
        """Record a finding, an action or a note."""
        event = replace(event, time=event.time or time.perf_counter() - self._began)
        if self.store is not None:
            self.store.event(event)
        self._to_sinks(lambda sink: sink.event(event))

    # -- following -----------------------------------------------------------------------------

    def _reading_next(self) -> bool:
        return (self.step + 1) % self.every == 0

    def _hook(self, route: Route) -> Callable[..., None]:
        traffic = self._traffic[route.name]

        @torch.no_grad()
        def passed(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not module.training or recomputing():
                return
            seen = route.see(module, args, kwargs, output)
            if seen is None:
                return
            seen = self._padding.take_out(route, seen)
            reading = self._reading_next()
            traffic.passed(seen, reading)
            if reading and route.run is not None and self._readings % OUTPUTS_EVERY == 0 and args:
                rows = args[0].detach().reshape(-1, args[0].shape[-1])
                real = rows if seen.real is None else rows[seen.real]
                self._rows[route.name] = real[:_PROBE_ROWS].clone()
            self._passes += 1
            if self._passes == _PATIENCE:
                self._complain(
                    "steps",
                    f"watch: {_PATIENCE} forward passes and no optimizer step. Is another optimizer in "
                    "use, or was its hook removed?",
                )

        return passed

    def _skipped(self) -> bool:
        # A fused optimizer under a GradScaler is called even when the step is to be skipped.
        found_inf = getattr(self.optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf.any())

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._reading_next() and not self._skipped():
            for path in self._paths:
                path.before_step()
            self._layers.before_step()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._skipped():
            return
        self.step += 1
        self._passes = 0
        if self._cost is not None and self._cost.counting:
            self._cost.stepped([self._traffic[r.name].assignments() for r in self.routes if r.parts])
        for traffic in self._traffic.values():
            traffic.stepped()
        if self.step % self.every == 0:
            self._read()

    def _read(self) -> None:
        now = time.perf_counter()
        rates = learning_rates(self.optimizer)
        found: list[Record] = []
        for traffic in self._traffic.values():
            found += traffic.read(self.step)
        for path in self._paths:
            found += path.read(self.step, rates)
        found += self._outputs()
        if self.connections is not None:
            changed = self.connections.changed()
            found += self.connections.read(self.step)
            if self._cost is not None:
                found.append(Record(self.step, "sparse/flops_ratio", "", self._cost.ratio()))
            self._layers_renewed(changed)
        found += self._layers.read(self.step, rates)
        found += subject.means(self.step, found)
        found += [
            Record(self.step, "run/time", "", now - self._began),
            Record(self.step, "run/step_seconds", "", (now - self._last) / self.every),
            Record(self.step, "run/lr", "", float(self.optimizer.param_groups[0].get("lr", math.nan))),
        ]
        self._last = now
        self._readings += 1
        self._look_for_hooks()
        self._emit(found)

    def _outputs(self) -> list[Record]:
        rows, self._rows = self._rows, {}
        found = []
        for route in self.routes:
            if route.name in rows and route.run is not None and route.experts > 1:
                said = route.run(rows[route.name]).float().cpu().numpy()
                alike = float(np.mean([mean_cosine(said[:, i]) for i in range(min(8, said.shape[1]))]))
                found.append(Record(self.step, f"{route.family}/output_similarity", route.name, alike))
        return found

    def _layers_renewed(self, changed: Iterable[str]) -> None:
        assert self.sparsifier is not None
        for name in changed:
            if name in self.sparsifier.layers:
                self._layers.rewired(name, self.sparsifier.layers[name].topology.nnz)

    def _look_for_hooks(self) -> None:
        for route in self.routes:
            if self._hooks[route.name].id not in route.module._forward_hooks:
                self._complain(
                    route.name,
                    f"watch: the hook on layer '{route.name}' was removed; its routing is no longer recorded",
                )

    def _complain(self, about: str, message: str) -> None:
        if about not in self._complained:
            self._complained.add(about)
            warnings.warn(message, UserWarning, stacklevel=4)

    def _emit(self, records: list[Record]) -> None:
        if self.store is not None:
            self.store.append(records)
        self._to_sinks(lambda sink: sink.write(records))

    def _to_sinks(self, send: Callable[[Sink], None]) -> None:
        """A sink that fails is let go: a network that is down does not end the training."""
        for sink in list(self.sinks):
            try:
                send(sink)
            except Exception as error:
                self.sinks.remove(sink)
                what = (
                    f"{type(sink).__name__} failed and gets no more records: {type(error).__name__}: {error}"
                )
                self._complain(f"sink {id(sink)}", f"watch: the sink {what}")

    # -- ending and going on -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The step and what was counted so far, for a run that goes on later."""
        return {"step": self.step, "idle": {name: t.idle.tolist() for name, t in self._traffic.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a saved step; what the store holds from after it is forgotten."""
        self.step = int(saved["step"])
        for name, idle in saved["idle"].items():
            if name in self._traffic:
                self._traffic[name].idle = np.array(idle, np.int64)
        if self.store is not None:
            self.store.trim(self.step)
            self._began = time.perf_counter() - self.store.last()[1]

    def go_on(self) -> None:
        """Go on after the last step that the store holds, on all processes alike."""
        step, seconds = (0, 0.0) if self.store is None else self.store.last()
        device = next((p.device for p in self.model.parameters()), None)
        self.step = int(world_sum(torch.tensor(step, device=device)))
        self._began = time.perf_counter() - seconds

    def close(self) -> None:
        """Write what is left and let go of model and optimizer."""
        for handle in (*self._handles, *self._hooks.values()):
            handle.remove()
        if self.connections is not None:
            self.connections.handle.remove()
        if self._cost is not None:
            self._cost.stop()
        self._to_sinks(lambda sink: sink.close())
        if self.store is not None:
            self.store.describe(finished=time.time(), last_step=self.step)
            self.store.close()
            self.store = None
        self.sinks = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        found = subject.said(self.routes, self.sparsifier, self._layers)
        return f"Watch({found}, every={self.every}, run={self.run})"
