"""The benchmark of mixtures of experts, on layers small enough for a test; no time is asserted."""

import json

from sparsight.bench import moe, table
from sparsight.bench.moe import MoEShape

SMALL = MoEShape(16, 8, 16, 4, 2, 1.12)


def test_the_layer_runs_beside_its_peers_and_the_table_is_stored(tmp_path):
    row = moe.block_row(SMALL, 1, repeats=2, seconds=0)
    assert set(row.ratios) == {"sparsight", "Mixtral grouped_mm", "Mixtral eager"}
    rows = [
        row,
        moe.estimator_row(SMALL, 1, repeats=2, seconds=0),
        moe.routing_row(1, repeats=2, tokens=8, dim=4),
    ]
    assert set(rows[1].ratios) == set(moe.ESTIMATORS)
    assert set(rows[2].ratios) == {"E16", "E32", "E64", "E128", "E256"}
    text, data = table.save(table.Measured(moe=rows), tmp_path)
    assert "T16 d8 h16 E4 k2" in text.read_text()
    assert json.loads(data.read_text())["moe"][0]["goal"] == 1.12


def test_the_table_says_when_transformers_is_missing(monkeypatch):
    monkeypatch.setattr(moe, "peers_are_here", lambda: False)
    row = moe.block_row(SMALL, 1, repeats=2, seconds=0)
    assert set(row.ratios) == {"sparsight"}
    assert "transformers is not installed" in moe.render_moe([row])
