"""What a recipe returns: everything a run needs, in one small object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a recipe's signature has to be readable without waiting for torch
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Stateful(Protocol):
    """Whatever can be saved and taken up again: a Sparsifier, a scheduler, a scaler."""

    def state_dict(self) -> Any:
        """Tensors, numbers, strings, and lists and dicts of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a saved state."""


@dataclass
class Tap:
    """Where a recipe lets go of its per-token losses, before the step; nobody listens unless asked to.

    >>> tap, heard = Tap(), []
    >>> tap("lost")
    >>> tap.listener = heard.append
    >>> tap("heard")
    >>> heard
    ['heard']
    """

    listener: Callable[[Tensor], None] | None = None

    def __call__(self, losses: Tensor) -> None:
        """One number a token, in the order in which the model saw them."""
        if self.listener is not None:
            self.listener(losses)


@dataclass(frozen=True)
class Training:
    """A run that is ready to start.

    `step(i)` makes optimizer step i and returns what it measured, `loss` among it. Its data must follow from
    i (and a seed) alone: then a run goes on where it stopped, and nothing about data has to be saved. Noise
    may come from torch's generator, whose state is saved.

    `evaluate()` measures quality; it is called in eval mode without gradients, and what it draws from
    torch's generator does not count. `parts` are saved beside the model and the optimizer. `data` is any
    text that changes when the data does; a run goes on only where it is the same. `main` names the number of
    `evaluate()` that a person asks for first; reports show it as the quality of the run.
    """

    model: nn.Module
    optimizer: Optimizer
    steps: int
    step: Callable[[int], Mapping[str, float]]
    evaluate: Callable[[], Mapping[str, float]] = dict
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    losses: Tap = field(default_factory=Tap)
    data: str = ""
    main: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"Training: steps must be an integer >= 1, got {self.steps!r}")
        for name in ("step", "evaluate"):
            if not callable(getattr(self, name)):
                raise ValueError(f"Training: {name} must be a function, got {getattr(self, name)!r}")
        for name, part in self.parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(
                    f"Training: part '{name}' must have state_dict and load_state_dict, "
                    f"got {type(part).__name__}"
                )
