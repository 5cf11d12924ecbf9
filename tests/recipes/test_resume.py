"""Stopped and taken up again, a run ends as if it had never been stopped: the same bits."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsight as sp
from sparsight.recipes import Paths, Training, Weights, checkpoint
from sparsight.recipes.run import train
from tests.recipes.conftest import Tiny

COMPRESSED = Weights(density=0.2, storage="compressed", every=4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("image", {}),
    "resnet, with running means": ("image", {"network": "resnet", "width": 4}),
    "RigL, compressed": ("image", {"weights": COMPRESSED}),
    "SET, masked": ("image", {"weights": Weights(density=0.2, method="set", storage="masked", every=4)}),
    "loss-free bias": ("language", {"paths": Paths(experts=3, balance="bias")}),
    "SparseMixer's noise": ("language", {"paths": Paths(experts=3, estimator="sparsemixer")}),
    "both": ("language", {"weights": COMPRESSED, "paths": Paths(experts=3, estimator="sparsemixer")}),
    "running means of experts": ("image", {"paths": Paths(experts=3, estimator="default_moe")}),
    "translation": ("translation", {"paths": Paths(experts=2)}),
    "electra, across its two phases": ("electra", {"weights": COMPRESSED, "steps": 10, "tune": 10}),
}


def interrupted_at(training: Training, step: int) -> Training:
    """The same training; in the middle of that step somebody presses Ctrl-C."""
    from dataclasses import replace

    def stepped(i: int) -> Any:
        if i == step:
            os.kill(os.getpid(), signal.SIGINT)
        return training.step(i)

    return replace(training, step=stepped)


def same(left: Any, right: Any, where: str = "") -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            same(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            same(a, b, f"{where}/{number}")
    else:
        assert left == right or left != left, where


def content(run: Path) -> dict[str, Any]:
    saved = checkpoint.read(run)
    del saved["progress"]["seconds"]
    return saved


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_same_to_the_last_bit(case: str, tiny: Tiny, tmp_path: Path):
    recipe, knobs = CASES[case]
    knobs = {"steps": 20, **knobs}
    first = tiny.make(recipe, **knobs)
    if knobs.get("weights") is COMPRESSED:
        assert any(isinstance(module, sp.SparseLinear) for module in first.model.modules())
    whole = train(first, tmp_path / "whole", quiet=True)
    assert whole.stopped_by is None

    stopped = train(interrupted_at(tiny.make(recipe, **knobs), 9), tmp_path / "parts", quiet=True)
    assert (stopped.step, stopped.stopped_by) == (10, signal.SIGINT)
    torch.manual_seed(12345)  # another process has another generator
    resumed = train(tiny.make(recipe, **knobs), tmp_path / "parts", resume=True, quiet=True)
    assert resumed.step == whole.step == 20
    assert resumed.metrics == whole.metrics
    same(content(tmp_path / "parts"), content(tmp_path / "whole"))


def test_the_store_of_a_resumed_run_has_no_gap_and_no_double(tiny: Tiny, tmp_path: Path):
    knobs: dict[str, Any] = {"steps": 20, "paths": Paths(experts=2)}
    train(interrupted_at(tiny.make("image", **knobs), 12), tmp_path / "run", quiet=True, watch_every=2)
    train(tiny.make("image", **knobs), tmp_path / "run", resume=True, quiet=True, watch_every=2)
    history = sp.load_run(tmp_path / "run")
    assert history.get("log/loss", "").steps.tolist() == list(range(1, 21))
    assert history.get("log/accuracy", "").steps.tolist() == [5, 10, 15, 20]
    place = history.places("moe/load_cv")[0]
    assert history.get("moe/load_cv", place).steps.tolist() == list(range(2, 21, 2))


def test_looking_does_not_change_what_is_seen(tiny: Tiny, tmp_path: Path):
    def final(name: str, **options: Any) -> dict[str, Any]:
        training = tiny.make("language", steps=8, paths=Paths(experts=3, estimator="sparsemixer"))
        train(training, tmp_path / name, quiet=True, **options)
        return dict(checkpoint.read(tmp_path / name)["model"])

    plain = final("plain", evaluations=1, watch_every=0)
    same(plain, final("watched", evaluations=8, watch_every=1, checkpoint_every=3))


def test_a_user_s_generators_go_on_too(tmp_path: Path):
    import random

    import numpy as np

    def make() -> Training:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(i: int) -> dict[str, float]:
            noise = random.random() + np.random.rand() + torch.rand(1)
            loss = (model(torch.ones(1, 1)) - noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return {"loss": loss.item()}

        return Training(model, optimizer, 10, step, parts={"scheduler": scheduler})

    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value)

    seed(1)
    train(make(), tmp_path / "whole", quiet=True)
    seed(1)
    train(interrupted_at(make(), 4), tmp_path / "parts", quiet=True)
    seed(2)
    train(make(), tmp_path / "parts", resume=True, quiet=True)
    same(content(tmp_path / "parts"), content(tmp_path / "whole"))


def test_what_does_not_fit_is_refused(tiny: Tiny, tmp_path: Path):
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="has no checkpoint"):
        train(tiny.make("image", steps=2), run, resume=True, quiet=True)
    train(tiny.make("image", steps=2), run, quiet=True)
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny.make("image", steps=2), run, quiet=True)
    with pytest.raises(ValueError, match="does not fit the recipe as it is now"):
        train(tiny.make("image", steps=2, width=8), run, resume=True, quiet=True)
    with pytest.raises(ValueError, match=r"holds the parts \[\], the recipe has \['sparse'\]"):
        train(tiny.make("image", steps=2, weights=Weights(density=0.5)), run, resume=True, quiet=True)
    with pytest.raises(ValueError, match=r"the data of .* is not what it was when the run began"):
        train(tiny.make("image", data="digits", path=None, steps=2), run, resume=True, quiet=True)
    (run / checkpoint.FILE).write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(ValueError, match="is not a checkpoint that can be read"):
        train(tiny.make("image", steps=2), run, resume=True, quiet=True)


def test_asked_twice_it_stops_at_once_and_the_old_checkpoint_stays(tiny: Tiny, tmp_path: Path):
    from dataclasses import replace

    training = tiny.make("image", steps=10)
    before = signal.getsignal(signal.SIGINT)

    def stepped(i: int) -> Any:
        if i == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return training.step(i)

    with pytest.raises(KeyboardInterrupt):
        train(replace(training, step=stepped), tmp_path, quiet=True, checkpoint_every=2)
    assert checkpoint.read(tmp_path)["progress"]["step"] == 4
    assert signal.getsignal(signal.SIGINT) is before
