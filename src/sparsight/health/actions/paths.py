"""Actions on the settings of routed layers: how hard to balance, how noisy, how many, how much room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

from torch import nn

from sparsight.dst.schedules import Schedule
from sparsight.health.actions.core import Done, RefusedError, Run, positive, undo_all
from sparsight.moe.balancers import Balancer, SwitchLoss, at
from sparsight.moe.layer import MoE
from sparsight.moe.ledger import Ledger


@dataclass(frozen=True)
class Scaled:
    """A coefficient that was multiplied: the larger of `times`·coef and `least`, step by step."""

    coef: float | Schedule
    times: float
    least: float = 0.0

    def __call__(self, step: int) -> float:
        return max(self.times * at(self.coef, step), self.least)


@dataclass(frozen=True)
class Balance:
    """Multiply the coefficients that keep the load even (Switch, importance and entropy losses, the rate of
    a loss-free bias), to at least `least`. A layer without any gets a Switch loss of `least`, if the loop
    asks for `sp.balance_loss`; z-losses do not balance and stay."""

    where: str = ""
    times: float = 2.0
    least: float = 0.0
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        positive("Balance: times", self.times)
        if self.least < 0:
            raise RefusedError(f"Balance: least must be 0 or more, got {self.least}")
        foreign = _aux_coefficients(run.model)
        if foreign and not any(isinstance(r.module, MoE) for r in run.routed(self.where)):
            return self._foreign(foreign)
        undo: list[Callable[[], None]] = []
        changed = []
        reasons = []
        for name, moe in run.own(self.where, "balance coefficients"):
            new, reason = self._balancers(moe)
            if new is None:
                reasons.append(f"{name}: {reason}")
                continue
            undo.append(_swap_balancers(moe.ledger, new))
            changed.append(name)
        if not changed:
            raise RefusedError("; ".join(reasons))
        message = f"balance of {', '.join(changed)} times {self.times:g}"
        message += f", at least {self.least:g}" if self.least else ""
        return Done(message, lambda: undo_all(undo))

    def _balancers(self, moe: MoE) -> tuple[tuple[Balancer, ...] | None, str]:
        balancers = moe.ledger.balancers
        found = [_scaled(b, self.times, self.least) for b in balancers]
        if any(new is not old for new, old in zip(found, balancers, strict=True)):
            return tuple(found), ""
        if moe.router_kind.fixed or moe.router_kind.even or moe.router_kind.name == "relu":
            return None, f"the router '{moe.router_kind.name}' leaves nothing to balance"
        if not self.least:
            return None, "it has no balancer, and least=0 adds none"
        if not moe.ledger.asked:
            return None, "nobody adds sp.balance_loss(model) to the loss, so a balance loss would do nothing"
        return (*balancers, SwitchLoss(self.least)), ""

    def _foreign(self, modules: list[nn.Module]) -> Done:
        before = [float(module.router_aux_loss_coef) for module in modules]  # type: ignore[arg-type]
        for module, coef in zip(modules, before, strict=True):
            module.router_aux_loss_coef = max(self.times * coef, self.least)  # type: ignore[assignment]

        def undo() -> None:
            for module, coef in zip(modules, before, strict=True):
                module.router_aux_loss_coef = coef  # type: ignore[assignment]

        return Done(f"router_aux_loss_coef times {self.times:g}, at least {self.least:g}", undo)


def _aux_coefficients(model: nn.Module) -> list[nn.Module]:
    """Models of transformers that keep their coefficient where their loss reads it."""
    named = "router_aux_loss_coef"
    return [m for m in model.modules() if isinstance(getattr(m, named, None), float)]


def _scaled(balancer: Balancer, times: float, least: float) -> Balancer:
    name = {"SwitchLoss": "coef", "ImportanceLoss": "coef", "EntropyLoss": "coef", "LossFreeBias": "rate"}
    attribute = name.get(type(balancer).__name__)
    if attribute is None or not is_dataclass(balancer):
        return balancer
    coef = getattr(balancer, attribute)
    new = Scaled(coef, times, least) if callable(coef) else max(times * coef, least)
    made: Any = replace(balancer, **{attribute: new})
    return made


def _swap_balancers(ledger: Ledger, balancers: tuple[Balancer, ...]) -> Callable[[], None]:
    before = ledger.balancers
    ledger.rebalance(balancers)
    return lambda: ledger.rebalance(before)


@dataclass(frozen=True)
class Noise:
    """Set the multiplicative noise on the routers' inputs, U(1 − jitter, 1 + jitter) in training."""

    where: str = ""
    jitter: float = 0.05
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        if not 0 <= self.jitter < 1:
            raise RefusedError(f"Noise: jitter must lie in [0, 1), got {self.jitter}")
        layers = [moe for _, moe in run.own(self.where, "routing noise")]
        return _set(
            layers, "router_kind", lambda moe: replace(moe.router_kind, jitter=self.jitter),
            f"routing noise {self.jitter:g}",
        )  # fmt: skip


@dataclass(frozen=True)
class Temperature:
    """Multiply the temperature that experts are drawn at (SparseMixer's family): higher explores more."""

    where: str = ""
    times: float = 2.0
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        positive("Temperature: times", self.times)
        layers = [moe for _, moe in run.own(self.where, "the temperature") if _has_temperature(moe)]
        if not layers:
            raise RefusedError(
                f"Temperature: no estimator of {self.where or 'this model'} draws at a temperature; "
                "CoolRouter makes any router less sure"
            )

        def warmer(moe: MoE) -> Any:
            now: Any = moe.estimator
            return replace(now, temperature=now.temperature * self.times)

        return _set(layers, "estimator", warmer, f"temperature times {self.times:g}")


def _has_temperature(moe: MoE) -> bool:
    estimator = moe.estimator
    return is_dataclass(estimator) and any(f.name == "temperature" for f in fields(estimator))


@dataclass(frozen=True)
class WidenMask:
    """Multiply SparseMixer's r: experts further behind the best can be drawn, and fewer tokens are left with
    a single one. Cooling the router would not help, since the mask does not feel the size of logits."""

    where: str = ""
    times: float = 2.0
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        positive("WidenMask: times", self.times)
        layers = [moe for _, moe in run.own(self.where, "the mask") if getattr(moe.estimator, "mask", None)]
        if not layers:
            raise RefusedError(f"WidenMask: no estimator of {self.where or 'this model'} has a mask")

        def wider(moe: MoE) -> Any:
            now: Any = moe.estimator
            return replace(now, mask=replace(now.mask, r=now.mask.r * self.times))

        return _set(layers, "estimator", wider, f"mask of the estimator times {self.times:g}")


@dataclass(frozen=True)
class CapacityFactor:
    """Multiply how many tokens an expert may take; `times` inf: no limit."""

    where: str = ""
    times: float = 1.5
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        if not self.times > 0:
            raise RefusedError(f"CapacityFactor: times must be above 0, got {self.times}")
        layers = [moe for _, moe in run.own(self.where, "capacity") if moe.capacity is not None]
        if not layers:
            raise RefusedError(
                f"CapacityFactor: {self.where or 'this model'} has no capacity and drops nothing"
            )

        def larger(moe: MoE) -> Any:
            assert moe.capacity is not None
            return replace(moe.capacity, factor=moe.capacity.factor * self.times)

        return _set(layers, "capacity", larger, f"capacity times {self.times:g}")


@dataclass(frozen=True)
class ExpertsPerToken:
    """Send each token to `k` experts; with `steps`, for that many steps (a warm-up: many first, then few)."""

    where: str = ""
    k: int = 2
    steps: int | None = None
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        layers = run.own(self.where, "k")
        if self.steps is not None and self.steps < 1:
            raise RefusedError(f"ExpertsPerToken: steps must be at least 1, got {self.steps}")
        for name, moe in layers:
            only, experts = moe.router_kind.only_k, len(moe.experts)
            if not 1 <= self.k <= experts or (only is not None and self.k != only):
                allowed = f"{only}" if only is not None else f"1 to {experts}"
                raise RefusedError(
                    f"ExpertsPerToken: '{name}' can send a token to {allowed} experts, got {self.k}"
                )
            if moe.router_kind.companion is not None:
                raise RefusedError(f"ExpertsPerToken: the penalty of '{name}' steers how many there are")
            needs = getattr(moe.estimator, "needs", None)
            if self.k > 1 and getattr(needs, "top1", False):
                raise RefusedError(f"ExpertsPerToken: the estimator of '{name}' is for one expert a token")
            if self.k == 1 and getattr(moe.estimator, "normalise", False):
                raise RefusedError(
                    f"ExpertsPerToken: with one expert, the normalised weight of '{name}' is always 1"
                )
        before = {moe.k for _, moe in layers}
        if self.steps is not None and len(before) > 1:
            raise RefusedError(
                f"ExpertsPerToken: layers with k = {sorted(before)} go back one by one; name one"
            )
        done = _set([moe for _, moe in layers], "k", lambda moe: self.k, f"{self.k} experts a token")
        if self.steps is None:
            return done
        back = ExpertsPerToken(self.where, before.pop())
        return replace(done, message=f"{done.message} for {self.steps} steps", later=(self.steps, back))


def _set(layers: list[MoE], attribute: str, value: Callable[[MoE], Any], message: str) -> Done:
    before = [getattr(moe, attribute) for moe in layers]
    new = [value(moe) for moe in layers]  # all of them made before any of them is set
    for moe, one in zip(layers, new, strict=True):
        setattr(moe, attribute, one)

    def undo() -> None:
        for moe, one in zip(layers, before, strict=True):
            setattr(moe, attribute, one)

    return Done(message, undo)
