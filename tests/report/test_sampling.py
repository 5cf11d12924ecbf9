"""Thinned histories: what a page reads of a long run."""

import numpy as np
import pytest

from sparsight.dynamics.reading import load_run as load
from sparsight.dynamics.records import Record
from sparsight.dynamics.sampling import latest, read_rows, sample
from sparsight.dynamics.store import Store
from tests.report.stores import small


@pytest.fixture
def long_run(tmp_path):
    store = Store(tmp_path / "long")
    for step in range(1, 5001):
        value = 100.0 if step == 3333 else float(step)
        vector = np.full(4, step, np.float32)
        store.append(
            [
                Record(step, "log/loss", "", value),
                Record(step, "moe/load_cv", "a", value),
                Record(step, "moe/tokens_per_expert", "a", vector),
            ]
        )
    store.close()
    return tmp_path / "long"


def test_a_short_run_is_read_whole(tmp_path):
    run = small(tmp_path / "run", steps=200)
    whole, thin = load(run), sample(run, points=400)
    assert list(whole.series) == list(thin.series)
    for key, series in whole.series.items():
        assert np.array_equal(series.values, thin.series[key].values, equal_nan=True), key
    assert whole.events == thin.events
    assert whole.meta == thin.meta


def test_every_series_has_its_ends_and_not_many_more_points_than_asked_for(long_run):
    thin = sample(long_run, points=50)
    assert len(thin.series) == 3
    for key, series in thin.series.items():
        assert (series.steps[0], series.steps[-1]) == (1, 5000), key
        assert 40 <= len(series) <= 60, key
        assert (np.diff(series.steps) > 0).all()


def test_the_whole_models_numbers_keep_a_single_dip(long_run):
    thin = sample(long_run, points=50)
    loss = thin.get("log/loss")
    assert loss.values[loss.steps == 3333].tolist() == [100.0]


def test_every_point_is_one_that_was_measured(long_run):
    whole, thin = load(long_run), sample(long_run, points=70)
    for key, series in thin.series.items():
        at = np.searchsorted(whole.series[key].steps, series.steps)
        assert np.array_equal(whole.series[key].values[at], series.values), key


def test_names_and_places_can_be_chosen(tmp_path):
    run = small(tmp_path / "run", steps=100)
    chosen = sample(run, ["log/loss", "moe/load_entropy"], wanted=lambda key: key[1] != "blocks.1.mlp")
    assert set(chosen.series) == {
        ("log/loss", ""), ("moe/load_entropy", ""), ("moe/load_entropy", "blocks.0.mlp")
    }  # fmt: skip


def test_nan_stays_nan(tmp_path):
    store = Store(tmp_path / "run")
    store.append([Record(step, "log/loss", "", float("nan")) for step in range(1000)])
    store.close()
    assert np.isnan(sample(tmp_path / "run", points=20).get("log/loss").values).all()


def test_latest_is_the_last_reading(long_run):
    found = latest(long_run, lambda name: name.startswith("log/"))
    assert found.get("log/loss").steps.tolist() == [5000]
    assert list(found.series) == [("log/loss", "")]


def test_rows_are_all_records(long_run):
    rows = list(read_rows(long_run))
    assert len(rows) == 15_000
    assert rows[0] == (1, "log/loss", "", 1.0)
    assert rows[-1] == (5000, "moe/tokens_per_expert", "a", [5000.0] * 4)
