"""What one can do about a finding, in one sentence a rule. The manager turns some of them into actions."""

from __future__ import annotations

from collections.abc import Mapping

ADVICE: Mapping[str, str] = {
    "expert_collapse": "raise the balance coefficient or add sp.LossFreeBias(), and revive the experts that "
    "have died; until then the layer is a dense one",
    "collapse_onset": "raise the balance coefficient or the routing noise (jitter) now, while all experts "
    "still learn",
    "dead_experts": "revive them from the busiest expert with some noise, router row and optimizer state "
    "too, and raise the balance coefficient",
    "overload": "raise the balance coefficient or add sp.LossFreeBias(); with a fixed router, choose another "
    "seed or more experts",
    "dominance": "raise the balance coefficient or the routing noise before the leader takes all",
    "drop_rate": "raise the capacity factor, or balance the load first: raise the balance coefficient",
    "gate_saturation": "add sp.ZLoss(), raise the router's temperature or lower its learning rate",
    "singletons": "widen the mask: a larger r in sp.SparseMixer(r=...), or sp.ZLoss() to draw the logits "
    "together",
    "router_not_learning": "look whether the gates reach the loss: detached weights, a single normalised "
    "gate, a router missing from the optimizer",
    "entropy_crash": "lower the router's learning rate or warm it up, raise its temperature or noise",
    "experts_alike": "set them apart: noise at upcycling, routing noise, or train with fewer experts",
    "path_behind": "look at the tokens of this expert: they may be harder, or it may learn too slowly",
    "non_finite_gradient": "rewind to a checkpoint from before, then clip gradients or lower the learning "
    "rate",
    "exploding_gradient": "clip gradients by path, or lower the learning rate of this one",
    "starved_parameters": "balance the load, raise the learning rate of the rarely updated, or remove what "
    "is not used",
    "capacity_without_competence": "initialise them anew or remove them: they cost time and change nothing",
    "frozen_topology": "let the search go on: a drop fraction above 0 and an end at about three quarters of "
    "the training",
    "short_lived_growth": "give grown weights time: a longer period between updates, or a smaller drop "
    "fraction",
    "low_exploration": "raise the drop fraction, or update more often",
    "dead_neurons": "regrow them, lower the sparsity of this layer, or use a distribution that gives it more "
    "(sp.erk())",
    "over_sparsified": "lower the sparsity, ramp it up more slowly, or give this layer more of the budget",
    "pruned_too_fast": "prune over more steps, or rewind to before and ramp more slowly",
    "loss_not_finite": "rewind to a checkpoint from before and lower the learning rate",
    "loss_diverging": "rewind to the best checkpoint and lower the learning rate",
    "not_learning": "raise the learning rate, lower the sparsity, or look at the data and the loss",
    "falls_under_shift": "train with this shift in the data, or do not use the model where it occurs",
    "speed_over_quality": "compare at equal time, not at equal steps: a denser or longer run may be the "
    "better bargain",
}


def advice_for(rule: str) -> str:
    """What to do about a rule's findings; nothing for a rule of one's own.

    >>> advice_for("low_exploration")
    'raise the drop fraction, or update more often'
    """
    return ADVICE.get(rule, "")
