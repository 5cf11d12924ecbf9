"""The knobs that all recipes share: how sparse the weights are, and how many paths there are.

Importing this file does not import torch, so that the command line can show the knobs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    import sparsight as sp
    from sparsight.moe.balancers import Balancer
    from sparsight.moe.estimators import Estimator

MethodName = Literal[
    "rigl", "set", "static", "snfs", "itop", "mest", "gmp", "granet", "acdc", "srigl", "top_kast", "snip"
]
EstimatorName = Literal[
    "switch",
    "sparsemixer",
    "sparsemixer2",
    "sparsemixer2star",
    "euler",
    "midpoint",
    "heun3",
    "simpson",
    "gauss2",
    "gauss3",
    "radau",
    "lobatto",
    "straight_through",
    "gumbel",
    "densemixer",
    "default_moe",
]


@dataclass(frozen=True)
class Weights:
    """Sparse weights: connections that come and go.

    Args:
        density: Share of the weights that exist; 1 is a dense network.
        method: How connections are swapped (docs/methods).
        every: Steps between swaps; 0 chooses a thirtieth of the training, at most 100.
        storage: Compressed is fast and small, masked is dense with zeros, auto chooses layer by layer.
    """

    density: float = 1.0
    method: MethodName = "rigl"
    every: int = 0
    storage: Literal["auto", "compressed", "masked"] = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must lie in (0, 1], got {self.density}")
        if self.every < 0:
            raise ValueError(f"every must be a number of steps, or 0 to choose one, got {self.every}")

    def apply(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int,
        seed: int,
        loss: Callable[[], Tensor],
        keep_dense: tuple[str, ...] = (),
    ) -> dict[str, sp.Sparsifier]:
        """Make the model sparse. What comes back belongs into the parts of a Training: nothing if dense.

        `loss` computes the loss of one batch, which SNIP looks at.
        """
        if self.density == 1:
            return {}
        import sparsight as sp

        sparse = sp.sparsify(
            model,
            optimizer,
            density=self.density,
            # With the balance losses of this pass: they must not wait for the first step.
            method=self._method(steps, lambda: loss() + sp.balance_loss(model)),
            storage=self.storage,
            keep_dense=keep_dense,
            seed=seed,
        )
        return {"sparse": sparse}

    def _method(self, steps: int, loss: Callable[[], Tensor]) -> sp.Method:
        import sparsight as sp

        every = self.every or min(max(steps // 30, 1), 100)
        made: dict[MethodName, Callable[[], sp.Method]] = {
            "rigl": lambda: sp.rigl(steps=steps, every=every),
            "set": lambda: sp.set_(every=every, end=max(int(0.75 * steps), every)),
            "static": sp.static,
            "snfs": lambda: sp.snfs(steps=steps, every=every),
            "itop": lambda: sp.itop(steps=steps, every=every),
            "mest": lambda: sp.mest(steps=steps, every=every),
            "gmp": lambda: sp.gmp(steps=steps, every=every),
            "granet": lambda: sp.granet(steps=steps, every=every, initial_density=max(0.5, self.density)),
            "acdc": lambda: sp.acdc(steps=steps, phase=max(steps // 20, 1)),
            "srigl": lambda: sp.srigl(steps=steps, every=every),
            "top_kast": lambda: sp.top_kast(backward=min(2 * self.density, 1.0), every=every),
            "snip": lambda: sp.snip(loss),
        }
        return made[self.method]()


@dataclass(frozen=True)
class Paths:
    """Sparse paths: a mixture of experts in each feed-forward block.

    Args:
        experts: Experts of a block; 0 is one dense block.
        k: Experts that each token goes through.
        estimator: What is drawn, its weight and the router's gradient; switch is plain top-k (docs/moe.md).
        balance: What keeps the load even: an auxiliary loss, a bias that costs no gradient, or nothing.
        capacity: An expert's most tokens, as a multiple of its fair share; None drops nothing.
    """

    experts: int = 0
    k: int = 1
    estimator: EstimatorName = "switch"
    balance: Literal["loss", "bias", "none"] = "loss"
    capacity: float | None = None

    def __post_init__(self) -> None:
        if self.experts < 0:
            raise ValueError(f"experts must be a number >= 0, got {self.experts}")

    def block(self, dim: int, hidden: int) -> nn.Module:
        """A feed-forward block: `sp.MLP`, or an `sp.MoE` of blocks of that size."""
        import sparsight as sp

        if not self.experts:
            return sp.MLP(dim, hidden)
        return sp.MoE(
            dim,
            hidden,
            experts=self.experts,
            k=self.k,
            estimator=self._estimator(),
            balance=self._balance(),
            capacity=self.capacity,
        )

    def follow(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Let the balancers see the optimizer's steps."""
        import sparsight as sp

        if self.experts:
            sp.follow_steps(model, optimizer)

    def _estimator(self) -> Estimator:
        import sparsight as sp

        made: dict[EstimatorName, Callable[[], Estimator]] = {
            "switch": sp.GatingOnly if self.k == 1 else lambda: sp.GatingOnly(normalise=True),
            "sparsemixer": sp.SparseMixer,
            "sparsemixer2": sp.SparseMixer2,
            "sparsemixer2star": sp.SparseMixer2Star,
            "euler": lambda: sp.euler,
            "midpoint": lambda: sp.midpoint,
            "heun3": lambda: sp.heun3,
            "simpson": lambda: sp.simpson,
            "gauss2": lambda: sp.gauss2,
            "gauss3": lambda: sp.gauss3,
            "radau": lambda: sp.radau,
            "lobatto": lambda: sp.lobatto,
            "straight_through": sp.StraightThrough,
            "gumbel": sp.GumbelStraightThrough,
            "densemixer": sp.DenseMixer,
            "default_moe": sp.DefaultMoE,
        }
        return made[self.estimator]()

    def _balance(self) -> list[Balancer]:
        import sparsight as sp

        if self.balance == "loss":
            return [sp.SwitchLoss(0.01), sp.ZLoss(1e-3)]
        return [sp.LossFreeBias(1e-3)] if self.balance == "bias" else []
