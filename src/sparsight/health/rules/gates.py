"""Rules on routers: whether they can still learn, and whether their experts differ."""

from __future__ import annotations

import math
import operator
from functools import partial

import numpy as np

from sparsight.dynamics.history import History, Series
from sparsight.dynamics.records import Severity
from sparsight.health.findings import Finding
from sparsight.health.looking import average, layer, middle, paths, percent, scalars, since, vectors


def gate_saturation(history: History, *, worth_a_look: float = 0.75, too_much: float = 0.9) -> list[Finding]:
    """Most tokens have a top probability above 0.99, so the router hardly learns from them.

    A gate's gradient goes with p(1 − p): 0.25 where it is undecided, less than 0.01 where it is saturated.
    With nine tokens of ten saturated, the router is as good as frozen in the state it is in.
    """
    found = []
    for path in paths(history, "gate_saturation"):
        series = scalars(history, "moe/gate_saturation", path.where)
        onset = since(series, lambda share: share >= worth_a_look)
        if path.fixed or onset is None:
            continue
        share = average(series.tail(3).values)
        found.append(
            Finding(
                "gate_saturation",
                "act" if share >= too_much else "warn",
                path.where,
                int(series.steps[-1]),
                onset,
                f"{path.where}: the gate is saturated (top probability above 0.99) for {percent(share)} of "
                f"the tokens since step {onset}; the router learns almost nothing from them.",
                {"gate_saturation": share, "router": str(path.about.get("router", ""))},
            )
        )
    return found


def singletons(history: History, *, worth_a_look: float = 0.95, too_much: float = 0.99) -> list[Finding]:
    """SparseMixer's mask leaves nearly every token one expert, and a choice of one teaches nothing.

    A router that knows its mind leaves most tokens one expert by design. It stops learning where not one
    token in twenty has a choice, and has stopped where not one in a hundred has.
    """
    found = []
    for path in paths(history, "singleton_frac"):
        series = scalars(history, "moe/singleton_frac", path.where)
        onset = since(series, lambda share: share >= worth_a_look)
        if onset is None:
            continue
        share = average(series.tail(3).values)
        found.append(
            Finding(
                "singletons",
                "act" if share >= too_much else "warn",
                path.where,
                int(series.steps[-1]),
                onset,
                f"{path.where}: the mask leaves {percent(share)} of the tokens a single expert since step "
                f"{onset}; the router learns from the other {percent(max(0.0, 1 - share))} only.",
                {"singleton_frac": share},
            )
        )
    return found


def router_not_learning(history: History, *, ratio: float = 1e-8) -> list[Finding]:
    """A router without a gradient: none at all, or less than `ratio` of its experts'.

    A router whose weights were told not to learn has no gradient to record; that may be meant, so it is
    worth a look only.
    """
    found = []
    for family in ("moe", "depth"):
        for where in history.places(f"{family}/router_grad_norm"):
            if _fixed(history, where):
                continue
            series = scalars(history, f"{family}/router_grad_norm", where)
            experts = vectors(history, f"{family}/grad_norm", where)
            usual = middle(experts.values[-10:].max(1)) if len(experts) else math.nan
            limit = ratio * usual if usual > 0 else 0.0
            onset = since(series, partial(operator.ge, limit))
            if onset is not None:
                beside = f" beside {usual:.2g} of its experts" if usual > 0 else ""
                sentence = f"the router's gradient is {float(series.last):.2g}{beside} since step {onset}"
                evidence = {"router_grad_norm": float(series.last)}
                found.append(_deaf("act", where, series, onset, sentence, evidence))
    return found + [
        _deaf(
            "warn",
            where,
            series,
            int(series.steps[0]),
            f"no gradient of the router in {len(series)} readings",
            {},
        )
        for where in history.places("moe/grad_norm")
        if len(series := vectors(history, "moe/grad_norm", where)) >= 5
        and "router" in layer(history, where)
        and not _fixed(history, where)
        and not len(history.get("moe/router_grad_norm", where))
    ]


def _fixed(history: History, where: str) -> bool:
    about = layer(history, where)
    return bool(about.get("fixed", about.get("router") == "hash"))


def _deaf(
    severity: Severity, where: str, series: Series, onset: int, sentence: str, evidence: dict[str, float]
) -> Finding:
    message = f"{where}: {sentence}; it does not learn."
    return Finding("router_not_learning", severity, where, int(series.steps[-1]), onset, message, evidence)


def entropy_crash(history: History, *, fall: float = 0.5, within: int = 100) -> list[Finding]:
    """The tokens' routing entropy fell by `fall` of its range within `within` steps.

    A router that makes up its mind in a hundred steps has seen too little to know; what it has not tried by
    then it will hardly try again.
    """
    found = []
    for path in paths(history, "router_entropy"):
        whole = scalars(history, "moe/router_entropy", path.where)
        # ReMoE drives the number of its experts, and with it this entropy, down to k by itself.
        if path.fixed or path.about.get("router") == "relu" or len(whole) < 4:
            continue
        series = whole.since(int(whole.steps[-1]) - within)
        if len(series) < 3:
            continue
        before, now = average(series.values[:2]), average(series.values[-2:])
        if not before - now >= fall:
            continue
        high = np.flatnonzero(series.values >= before - 0.25 * (before - now))
        onset, step = int(series.steps[high[-1]]), int(series.steps[-1])
        found.append(
            Finding(
                "entropy_crash",
                "warn",
                path.where,
                step,
                onset,
                f"{path.where}: the router's entropy fell from {before:.2f} to {now:.2f} in {step - onset} "
                f"steps, from step {onset}: it made up its mind before it could know.",
                {"before": before, "now": now},
            )
        )
    return found


def experts_alike(
    history: History, *, alike: float = 0.95, same: float = 0.9999, patience: int = 100
) -> list[Finding]:
    """Experts that compute the same: outputs (or weights) with a mean cosine above `alike` that stays so.

    Upcycled experts begin as copies, so the cosine must have failed to fall for `patience` steps. Experts
    with a cosine of `same` are one expert stored several times, and nothing sets them apart.
    """
    found = []
    for path in paths(history, "similarity"):
        outputs = scalars(history, "moe/output_similarity", path.where)
        weights = scalars(history, "moe/similarity", path.where)
        # Weights can differ and compute the same, so outputs are asked first where they were compared.
        series = outputs if len(outputs) >= 2 else weights
        onset = since(series, lambda cosine: cosine >= alike, readings=2, steps=patience)
        if onset is None:
            continue
        recent = series.since(int(series.steps[-1]) - patience)
        now = float(series.last)
        if len(recent) < 2 or not math.isfinite(now) or float(recent.values[0]) - now > 0.01:
            continue
        what = "outputs" if series is outputs else "weights"
        found.append(
            Finding(
                "experts_alike",
                "act" if now >= same else "warn",
                path.where,
                int(series.steps[-1]),
                onset,
                f"{path.where}: the {what} of its {path.experts} experts have a mean cosine of {now:.3f} "
                f"since step {onset} and do not part: {path.experts} experts do the work of one.",
                {"cosine": now, "of": what},
            )
        )
    return found


def path_behind(
    history: History, *, times: float = 2.0, readings: int = 8, fall: float = 0.1
) -> list[Finding]:
    """Tokens of one expert have `times` the loss of the others', and it does not fall while theirs does.

    Set against each other are two spans of `readings`; to fall is to lose `fall` of itself.
    """
    found = []
    for path in paths(history, "expert_loss"):
        series = vectors(history, "moe/expert_loss", path.where).tail(2 * readings)
        if len(series) < 2 * readings or series.values.shape[1] < 2:
            continue
        early = np.array([middle(column) for column in series.values[:readings].T])
        late = np.array([middle(column) for column in series.values[readings:].T])
        usual_early, usual = middle(early), middle(late)
        behind = np.flatnonzero((late >= times * usual) & (late > (1 - fall) * early)).tolist()
        if not behind or not 0 < usual < (1 - fall) * usual_early:
            continue
        worst = max(behind, key=lambda expert: late[expert])
        found.append(
            Finding(
                "path_behind",
                "info",
                path.where,
                int(series.steps[-1]),
                int(series.steps[0]),
                f"{path.where}: the tokens of expert {worst} have a loss of {late[worst]:.3g}, and those of "
                f"the usual expert {usual:.3g}; since step {int(series.steps[0])} theirs falls and its does "
                "not.",
                {"experts": behind, "loss": float(late[worst]), "usual": usual},
            )
        )
    return found
