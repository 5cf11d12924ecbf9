"""The manager: it says once what it finds, keeps to its limits, and leaves a healthy run alone."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import sparsight as sp
from sparsight.dynamics.history import collect
from sparsight.dynamics.records import Record
from sparsight.health.findings import Finding
from sparsight.health.recent import NUMBERS, Recent
from tests.health.patients import expert_run, sparse_run, tokens

A = sp.actions


class Case:
    """A tiny run whose findings are written by hand: the rules are given, the manager is tested."""

    def __init__(self, folder: Path, policy, **limits) -> None:
        torch.manual_seed(0)
        self.model = sp.MoE(8, 16, 4, balance=[sp.SwitchLoss(0.01)])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.watch = sp.watch(self.model, self.optimizer, folder / "run", every=1)
        self.findings: list[Finding] = []
        limits = {"every": 1, "cooldown": 5, **limits}
        self.manager = sp.manage(self.watch, policy, rules=(lambda history: self.findings,), **limits)

    def find(self, severity="act", rule="dead_experts"):
        found = Finding(rule, severity, "model", self.watch.step, 0, "it is so.", {"experts": [1]})
        self.findings = [found]

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.randn(32, 8)
            self.optimizer.zero_grad()
            (self.model(x).square().mean() + sp.balance_loss(self.model)).backward()
            self.optimizer.step()

    def events(self, kind="action"):
        self.watch.store.flush()
        return [e for e in sp.load_run(self.watch.run).events if e.kind == kind]

    def coef(self) -> float:
        return self.model.ledger.balancers[0].coef


def doubling(finding):
    return [A.Balance("model", 2.0)]


def test_a_finding_is_recorded_once_and_its_end_too(tmp_path):
    case = Case(tmp_path, doubling)
    case.steps(2)
    case.find("warn")
    case.steps(4)
    assert [(e.rule, e.severity) for e in case.events("finding")] == [("dead_experts", "warn")]
    case.find("act")
    case.steps(3)
    assert [e.severity for e in case.events("finding")] == ["warn", "act"]
    assert "sick: dead experts" in repr(case.manager)
    case.findings = []
    case.steps(4)
    (note,) = case.events("note")
    assert note.data == {"resolved": True}
    assert "dead experts is over" in note.message
    assert "healthy" in repr(case.manager)
    case.find("act")
    case.steps(2)
    assert len(case.events("finding")) == 3


def test_advice_changes_nothing(tmp_path):
    case = Case(tmp_path, doubling)
    case.find()
    case.steps(12)
    (event,) = case.events()
    assert event.message == "would do: Balance(times=2.0, least=0.0)"
    assert event.data["mode"] == "advised"
    assert case.coef() == 0.01
    assert case.manager.spent == 0


def test_acting_keeps_to_cooldown_and_budget(tmp_path):
    case = Case(tmp_path, doubling, act=True, budget=3)
    case.find()
    case.steps(4)
    assert case.coef() == 0.02
    case.steps(20)
    assert case.coef() == pytest.approx(0.08)
    assert [e.step for e in case.events()] == [1, 6, 11]
    assert ["budget of 3" in e.message for e in case.events("note")] == [True]


def test_less_severe_findings_are_only_advised_on(tmp_path):
    case = Case(tmp_path, doubling, act=True)
    case.find("warn")
    case.steps(3)
    assert case.coef() == 0.01
    assert case.events()[0].data["mode"] == "advised"
    case.manager.close()
    eager = Case(tmp_path / "eager", doubling, act=True, on="warn")
    eager.find("warn")
    eager.steps(3)
    assert eager.coef() == 0.02


def test_a_refusal_is_recorded_and_costs_nothing(tmp_path):
    case = Case(tmp_path, lambda finding: [A.CapacityFactor("model"), A.Balance("model")], act=True)
    case.find()
    case.steps(2)
    refused, done = case.events()
    assert refused.data["mode"] == "refused"
    assert "drops nothing" in refused.message
    assert done.data["kind"] == "Balance"
    assert case.manager.spent == 1


def test_undo_takes_back_the_last_and_says_so(tmp_path):
    case = Case(tmp_path, doubling, act=True)
    case.steps(1)
    case.manager.apply(A.Balance("model", 5.0))
    case.manager.apply(A.ExpertsPerToken("model", k=2, steps=50))
    assert case.manager.undo() == A.ExpertsPerToken("model", k=2, steps=50)
    assert (case.model.k, case.coef()) == (1, 0.05)
    assert case.manager.state_dict()["later"] == []
    case.manager.undo()
    assert case.coef() == 0.01
    assert [e.data["mode"] for e in case.events()] == ["done", "done", "undone", "undone"]
    with pytest.raises(ValueError, match="nothing has been done"):
        case.manager.undo()


def test_what_belongs_to_later_is_done_later(tmp_path):
    case = Case(tmp_path, doubling, act=True)
    case.steps(1)
    case.manager.apply(A.ExpertsPerToken("model", k=3, steps=4))
    case.manager.apply(A.Every(A.Balance("model", 2.0), steps=3, times=3))
    seen = []
    for _ in range(8):
        case.steps(1)
        seen.append((case.model.k, round(case.coef(), 3)))
    assert [k for k, _ in seen] == [3, 3, 3, 1, 1, 1, 1, 1]
    assert [c for _, c in seen] == [0.02, 0.02, 0.04, 0.04, 0.04, 0.08, 0.08, 0.08]


def test_a_resumed_run_has_its_settings_limits_and_plans(tmp_path):
    case = Case(tmp_path, doubling, act=True, cooldown=50)
    case.find()
    case.steps(3)
    case.manager.apply(A.ExpertsPerToken("model", k=3, steps=10))
    case.manager.apply(A.ExpertRate("model", (1,), 2.0))
    case.manager.apply(A.Noise("model", 0.5))
    case.manager.undo()
    saved = json.loads(json.dumps(case.manager.state_dict()))
    again = Case(tmp_path / "again", doubling, act=True, cooldown=50)
    again.watch.load_state_dict(case.watch.state_dict())
    again.manager.load_state_dict(saved)
    assert (again.coef(), again.model.k, again.model.router_kind.jitter) == (0.02, 3, 0.0)
    assert again.manager.run().pace.of("model", 1) == 2.0
    again.find()
    again.steps(9)
    assert again.coef() == 0.02  # still cooling down, and found before
    assert not again.events("finding")
    again.steps(1)
    assert again.model.k == 1
    assert again.manager.state_dict()["spent"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"every": 0}, "every must be an integer >= 1"),
        ({"budget": -1}, "budget must be"),
        ({"on": "soon"}, "severity"),
        ({"policy": 3}, "expected a policy"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, options, why):
    case = Case(tmp_path, doubling)
    with pytest.raises(ValueError, match=why):
        sp.manage(case.watch, **options)
    with pytest.raises(ValueError, match=r"what sp\.watch returned, got MoE"):
        sp.manage(case.model)


@pytest.mark.parametrize("kind", ["experts", "rigl"])
def test_a_healthy_run_is_the_same_to_the_bit_with_the_manager_on(tmp_path, kind):
    """Noise in routing, so that one random number too many would show."""
    made = []
    for name, manage in (("off", None), ("on", {"act": True, "keep": 2, "keep_every": 20, "every": 10})):
        if kind == "experts":
            router = sp.routers.softmax(jitter=0.01)
            made.append(expert_run(tmp_path / name, steps=80, manage=manage, router=router))
        else:
            made.append(sparse_run(tmp_path / name, steps=80, manage=manage))
    off, on = made
    assert on.quality == off.quality
    for key, value in off.model.state_dict().items():
        assert torch.equal(value, on.model.state_dict()[key]), key
    assert not on.events("action")
    assert on.manager.checkpoints.kept


def test_recent_history_equals_what_was_collected_until_it_is_thinned():
    records = [Record(step, "moe/grad_norm", "a", np.array([step, 1.0], np.float32)) for step in range(100)]
    records += [Record(step, "log/loss", "", float(step)) for step in range(NUMBERS)]
    recent = Recent()
    recent.write(records)
    whole, held = collect(records), recent.history({})
    for key, series in whole.series.items():
        assert np.array_equal(series.steps, held.series[key].steps)
        assert np.array_equal(series.values, held.series[key].values)
    seen = held.get("log/loss")
    recent.write([Record(step, "log/loss", "", float(step)) for step in range(NUMBERS, 10 * NUMBERS)])
    assert np.array_equal(seen.values, whole.get("log/loss").values)  # whoever holds it sees what it saw
    now = recent.history({}).get("log/loss")
    assert now.steps[0] == 0
    assert np.array_equal(now.values, now.steps)
    assert np.array_equal(now.steps[-NUMBERS // 2 :], np.arange(10 * NUMBERS)[-NUMBERS // 2 :])
    assert (np.diff(now.steps) > 0).all()
    recent.write([Record(500, "log/loss", "", -1.0)])  # a run that was resumed from step 500
    assert recent.history({}).get("log/loss").last == -1.0
    assert recent.history({}).get("log/loss").steps[-1] == 500


def worker(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    moe = sp.MoE(12, 12, 4, balance=[sp.SwitchLoss(0.0)])
    with torch.no_grad():
        moe.router.weight[0, -1] = 8.0
    model = nn.parallel.DistributedDataParallel(moe, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watch = sp.watch(model, optimizer, f"{folder}/run", every=5)
    manager = sp.manage(watch, act=True, every=20, keep=1, keep_every=5)
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    for step in range(60):
        x, y = tokens(64, generator)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        (loss + sp.balance_loss(model)).backward()
        if step == 40:
            moe.experts[0].up.weight.grad[0, 0] = torch.nan
        optimizer.step()
        watch.log(loss=loss if rank == 0 else float("nan"))  # each process has its own losses
    done = [A.as_data(applied.action) for applied in manager.done]
    torch.save((moe.state_dict(), done), f"{folder}/{rank}.pt")
    watch.close()
    torch.distributed.destroy_process_group()


def test_two_processes_decide_and_do_the_same(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    (weights, done), (other, also) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert done == also
    assert {"Balance", "Revive", "Rewind"} <= {action["kind"] for action in done}
    for key, value in weights.items():
        if not key.startswith("ledger.load") and key != "ledger.tokens":
            assert torch.equal(value, other[key]), key
    assert torch.isfinite(weights["router.weight"]).all()
    assert len([e for e in sp.load_run(tmp_path / "run").events if e.kind == "action"]) >= len(done)
