"""The Sparsifier: keeps a model's weights on their topologies while the user's own loop trains it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsight import chance
from sparsight.dst import state
from sparsight.dst.flops import Flops, count_flops
from sparsight.dst.layer import Layer
from sparsight.dst.method import Method
from sparsight.dst.rewire import Quota, Rewiring, rewire
from sparsight.dst.summary import summary_table
from sparsight.nn.compressed import CompressedWeight
from sparsight.nn.convert import decompress
from sparsight.nn.layer import SparseLayer
from sparsight.topology import Topology

UpdateHook = Callable[[Layer, Rewiring], None]


class Sparsifier:
    """Made by `sparsify`. Attach it to an optimizer; the loop stays as it was.

    It counts the optimizer's steps. Where the method says an update is due, weak weights are swapped for
    promising ones, either in place of the weight step (RigL) or right after it (SET).
    """

    def __init__(
        self, model: nn.Module, layers: dict[str, Layer], method: Method, density: float, seed: int
    ) -> None:
        self.model = model
        self.layers = layers
        self._method = method
        self.target_density = density
        self.seed = seed
        self.step = 0
        self.updates = 0
        self.optimizer: Optimizer | None = None
        self._handles: list[Any] = []
        self._update_hooks: OrderedDict[int, UpdateHook] = OrderedDict()
        self._skipping = False
        self._versions: dict[str, int] = {}
        self._known: dict[str, Topology] = {}
        self._prepare_next()

    # -- attaching -----------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> Sparsifier:
        """Follow this optimizer's steps. Weights it does not hold keep their topology as it is."""
        if self.optimizer is not None:
            raise ValueError("this Sparsifier is attached to an optimizer already; detach() it first")
        require_held(optimizer, {name: x.weight.param for name, x in self.layers.items()})
        self.optimizer = optimizer
        for layer in self.layers.values():
            # An optimizer that was used before may hold momentum of weights that no longer exist.
            layer.weight.begin(layer.slots(optimizer.state))
        self._handles = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(self._on_stepped),
        ]
        return self

    def detach(self) -> None:
        """Let go of the optimizer; masks stay, and latent weights stay where they are."""
        if self.optimizer is not None:
            for layer in self.layers.values():
                layer.weight.end(layer.slots(self.optimizer.state))
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizer = None

    def densify(self) -> nn.Module:
        """Let go of the model too: an ordinary dense model whose missing weights start at zero."""
        optimizer = self.optimizer
        self.detach()
        for layer in self.layers.values():
            layer.weight.unhook()
            if isinstance(layer.weight, CompressedWeight):
                decompress(self.model, layer.weight, optimizer)
        self.layers = {}
        return self.model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_update_hooks": OrderedDict()}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        optimizer, self.optimizer = self.optimizer, None
        if optimizer is not None:
            self.attach(optimizer)
        self._remember_versions()

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Call `hook(layer, rewiring)` for each layer that an update is about to change."""
        handle = RemovableHandle(self._update_hooks)
        self._update_hooks[handle.id] = hook
        return handle

    @property
    def method(self) -> Method:
        """What drops and grows, how much and when. It may be replaced in mid-training."""
        return self._method

    @method.setter
    def method(self, method: Method) -> None:
        if not isinstance(method, Method):
            raise ValueError(f"method must be a Method such as sp.rigl(steps=10_000), got {method!r}")
        for part in ("latent", "momentum"):
            if (getattr(method, part) is None) != (getattr(self._method, part) is None):
                raise ValueError(
                    f"method '{method.name}' cannot take over from '{self._method.name}': one of them keeps "
                    f"{'missing weights' if part == 'latent' else 'a dense momentum'} and the other does "
                    "not; densify() and sparsify anew"
                )
        self._method = method
        self._prepare_next()

    # -- reading -------------------------------------------------------------------------------

    @property
    def topologies(self) -> dict[str, Topology]:
        return {name: layer.topology for name, layer in self.layers.items()}

    @property
    def density(self) -> float:
        """Existing weights / positions, over the sparse layers."""
        tops = self.topologies.values()
        return sum(t.nnz for t in tops) / sum(t.size for t in tops) if tops else 1.0

    @property
    def itop_rate(self) -> float:
        """Share of all positions that have existed at some time (ITOP's R_s)."""
        seen = sum(layer.explored.count for layer in self.layers.values())
        return seen / max(sum(layer.topology.size for layer in self.layers.values()), 1)

    def flops(self, *inputs: Any) -> Flops:
        """FLOPs of a forward pass and of a training step, sparse and dense.

        With `inputs`, the model runs once on them to see how often each layer is used; without, every
        weight counts as used once, which is right for plain MLPs and one row of data.
        """
        return count_flops(self.model, list(self.layers.values()), self.method, inputs)

    def summary(self, *inputs: Any) -> None:
        """Print a table: layer, shape, density, FLOPs, storage."""
        print(summary_table(self, self.flops(*inputs)))

    def __repr__(self) -> str:
        return (
            f"Sparsifier({self.method.name}, {len(self.layers)} layers, "
            f"density={self.density:.4g}, step={self.step})"
        )

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Topologies, counters and buffers as a flat dict of tensors (torch.save or safetensors)."""
        return state.pack(self)

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Take over a saved state; a state of another model is refused and changes nothing."""
        state.unpack(self, saved)
        self._prepare_next()

    def dense_state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict with every compressed weight as an ordinary dense one, zeros included.

        For export, and for averages over time: after a rewiring the same place in a compressed parameter
        holds another weight, so an average must be taken over the dense ones.
        """
        dense = dict(self.model.state_dict())
        for name, module in self.model.named_modules():
            if isinstance(module, SparseLayer):
                prefix = f"{name}." if name else ""
                for key in ("values", "crow", "col"):
                    del dense[prefix + key]
                dense[f"{prefix}weight"] = module.weight.detach()
        return dense

    def enforce(self) -> None:
        """Set missing weights to zero, after a change of the weights that no optimizer made."""
        for layer in self.layers.values():
            layer.weight.zero_missing()
        self._remember_versions()

    # -- the step ------------------------------------------------------------------------------

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_step(optimizer)
            return None
        kwargs = {**kwargs, "closure": _then_once(closure, lambda: self._before_step(optimizer))}
        return args[:1] + args[2:], kwargs

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        # A fused optimizer under a GradScaler is called even when the step is to be skipped.
        found_inf = getattr(optimizer, "found_inf", None)
        self._skipping = found_inf is not None and bool(found_inf.any())
        if self._skipping:
            return
        self._refuse_strays()
        for layer in self._training():
            layer.follow_momentum(mean_over_ranks)
            if self.method.latent is not None:
                layer.latent.wake()
                layer.latent.decay(*self.method.latent.decays(self.target_density))
        if self.method.replaces_step and self.method.due(self.step):
            for layer in self._update():
                layer.weight.param.grad = None  # the optimizer passes over it

    @torch.no_grad()
    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._skipping:
            return
        self.step += 1
        try:
            if not self.method.replaces_step and self.method.due(self.step):
                self._update()
        finally:
            for layer in self.layers.values():
                layer.weight.settle()
            self._prepare_next()

    def _prepare_next(self) -> None:
        method = self.method
        coming = self.step if method.replaces_step else self.step + 1
        swaps = method.ramp is not None or method.fraction(coming) != 0
        due = method.gradient == "always" or (method.gradient == "due" and method.due(coming) and swaps)
        for layer in self.layers.values():
            layer.weight.hook()
            layer.weight.collect(due)
        self._remember_versions()

    def _training(self) -> list[Layer]:
        """The layers that are free to change: not frozen, and in the optimizer's hands."""
        assert self.optimizer is not None
        held = _held_by(self.optimizer)
        return [x for x in self.layers.values() if x.trains and id(x.weight.param) in held]

    def _remember_versions(self) -> None:
        self._versions = {n: layer.weight.param._version for n, layer in self.layers.items()}
        self._known = self.topologies

    def _refuse_strays(self) -> None:
        """Weights that appeared at missing positions since our last look come from outside."""
        for name, layer in self.layers.items():
            if layer.weight.param._version == self._versions[name]:
                continue
            known = self._known[name]
            if layer.topology is not known and not layer.topology.same_as(known):
                raise ValueError(
                    f"layer '{name}': its topology is not the one this Sparsifier knows. A checkpoint of "
                    "the model was loaded: load the Sparsifier's state_dict as well"
                )
            if strays := layer.weight.strays():
                raise ValueError(
                    f"layer '{name}': {strays} weights that do not exist in its topology are not "
                    "zero. A checkpoint was loaded or weights were changed outside the optimizer: "
                    "load the Sparsifier's state_dict as well, or call enforce() to zero them"
                )

    # -- the update ----------------------------------------------------------------------------

    def _update(self) -> list[Layer]:
        """Plan every layer, then change every layer: an error in the plan changes nothing."""
        plans = self._plan()
        if not plans:
            return []
        for layer, quota, rewiring in plans:
            layer.target = quota.total
            for hook in self._update_hooks.values():
                hook(layer, rewiring)
            self._apply(layer, rewiring)
        self.updates += 1
        return [layer for layer, _, _ in plans]

    def _plan(self) -> list[tuple[Layer, Quota, Rewiring]]:
        method, step = self.method, self.step
        fraction = _in_unit_range(method.fraction(step), "drop fraction", step)
        ramp = 0.0 if method.ramp is None else _in_unit_range(method.ramp(step), "ramp", step)
        views, totals = {}, {}
        for layer in self._training():
            if method.gradient == "due" and not layer.weight.has_dense_grad:
                continue  # the layer took no part in this step
            if method.ramp is None and not method.replaces_step and layer.weight.param.grad is None:
                continue  # nor here, where the update follows the step
            total = layer.scheduled(ramp) if method.ramp is not None else layer.target
            if int(fraction * total) == 0 and total == layer.target:
                continue  # nothing to swap: the ordinary step goes on
            seed = chance.mix(self.seed, layer.name, self.updates)
            views[layer.name], totals[layer.name] = layer.view(seed, mean_over_ranks), total
        quotas = method.share(views, totals, fraction, method.drop) if views else {}
        if method.grow is None and any(quota.grow for quota in quotas.values()):
            raise ValueError(
                f"method '{method.name}' drops weights at step {step} (fraction {fraction}) but has "
                "no grow score to replace them"
            )
        return [
            (
                self.layers[name],
                quotas[name],
                rewire(view, method.drop, method.grow, quotas[name], method.structure),
            )
            for name, view in views.items()
        ]

    def _apply(self, layer: Layer, rewiring: Rewiring) -> None:
        optimizer_state = {} if self.optimizer is None else self.optimizer.state
        slots = layer.slots(optimizer_state)
        seed = chance.mix(self.seed, layer.name, self.updates)
        if self.method.latent is not None:
            backward = layer.backward_set(rewiring.after, self.method.latent.backward, seed)
            layer.latent.choose(rewiring.after, backward, slots)
        else:
            grown = None
            if self.method.grow_std:
                grown = self.method.grow_std * chance.normal(rewiring.grown, seed)
            layer.weight.rewire(rewiring.after, rewiring.source, grown, slots)
        layer.explored.add(layer.topology)

    @torch.no_grad()
    def move(self, name: str, rewiring: Rewiring, grown: Tensor | None = None) -> None:
        """Take one layer to another topology outside the method's schedule; its budget follows.

        Kept weights and their optimizer state go along; new ones start at zero, or at `grown`.
        """
        layer = self.layers[name]
        if self.method.latent is not None:
            raise ValueError(f"layer '{name}': {self.method.name} chooses topologies from its latent weights")
        change = rewiring.after.nnz - layer.target
        layer.target, layer.budget = layer.target + change, layer.budget + change
        for hook in self._update_hooks.values():
            hook(layer, rewiring)
        slots = layer.slots({} if self.optimizer is None else self.optimizer.state)
        layer.weight.rewire(rewiring.after, rewiring.source, grown, slots)
        layer.explored.add(layer.topology)
        self._prepare_next()


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean of g itself, not of |g|, over all ranks: every rank then makes the same choice."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def require_held(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that holds none of these weights."""
    if not _held_by(optimizer) & {id(weight) for weight in weights.values()}:
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) holds none of the sparse weights "
            f"{list(weights)}; was it built from another model's parameters?"
        )


def _in_unit_range(value: float, what: str, step: int) -> float:
    if not (isinstance(value, (int, float)) and 0 <= value <= 1):  # NaN fails too
        raise ValueError(f"the {what} at step {step} must lie in [0, 1], got {value}")
    return float(value)


def _then_once(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """A closure that runs `then` after its first evaluation, when the gradients are there."""
    done = False

    def wrapped() -> Any:
        nonlocal done
        loss = closure()
        if not done:
            done = True
            then()
        return loss

    return wrapped
