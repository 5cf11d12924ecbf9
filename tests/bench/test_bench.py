"""The benchmark measures what it says, on layers small enough for a test; no time is asserted."""

import contextlib
import json

import torch

from sparsight.bench import table
from sparsight.bench.layers import ConvShape, LinearShape, conv_rows, linear_rows
from sparsight.bench.measure import by_turns, ratio, threads
from sparsight.bench.training import memory, updates
from sparsight.cli import doctor


def test_candidates_take_turns():
    calls = []
    times = by_turns({name: (lambda name=name: calls.append(name)) for name in "abc"}, repeats=5, seconds=0)
    assert {name: len(own) for name, own in times.items()} == {"a": 5, "b": 5, "c": 5}
    turns = "".join(calls[6:])  # after two warm-up calls of each
    assert turns == "abcbcacababcbca"


def test_a_ratio_is_taken_turn_by_turn():
    """A slow moment that hits both sides leaves the ratio alone."""
    found = ratio([2.0, 20.0, 2.0, 2.0], [1.0, 10.0, 1.0, 1.0])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with contextlib.suppress(RuntimeError), threads(2):
        assert torch.get_num_threads() == 2
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_rows_tables_and_pictures(tmp_path):
    rows = linear_rows(LinearShape(4, 32, 16), 0.75, 1, repeats=2)
    rows += conv_rows(ConvShape(2, 4, 5), 0.75, 1, repeats=2)
    assert [row.what for row in rows] == ["forward", "forward+backward"] * 2
    assert set(rows[0].ratios) == {"compressed", "masked", "block 4×1", "block 8×1", "torch CSR"}
    assert all(value.median > 0 for row in rows for value in row.ratios.values())
    # The averages and the picture are over the published shapes: give one row such a name.
    named = [row if i else type(row)(row.what, "B128 512→256", *list(vars(row).values())[2:])
             for i, row in enumerate(rows[1:])]  # fmt: skip
    found = table.Measured(named, [updates(0.9, 1, steps=40, every=10)], [memory(0.9)])
    paths = table.save(found, tmp_path)
    assert [path.name for path in paths] == ["bench.txt", "bench.json", "speedup.svg"]
    assert "B128 512→256" in paths[0].read_text()
    saved = json.loads(paths[1].read_text())
    assert saved["rows"][0]["sparsity"] == 0.75
    assert 0 < saved["updates"][0]["share"] < 1
    assert saved["updates"][0]["steps_an_update"] > 0
    assert paths[2].read_text().startswith("<?xml")


def test_memory_at_ninety_per_cent_is_a_fifth_of_dense():
    """Weights, gradients, Adam state, topology and everything derived from it: bytes, not seconds."""
    found = memory(0.9)
    assert 0.1 < found.share <= 0.2


def test_the_doctor_says_what_runs(capsys):
    doctor(system=True)
    out = capsys.readouterr().out
    assert "torch" in out
    assert "kernels  native" in out
