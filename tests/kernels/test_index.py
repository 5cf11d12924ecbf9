"""The passes of a rewiring: C++ against plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsight import Topology, chance
from sparsight.kernels import index, native


@st.composite
def positions(draw, size=200):
    return torch.tensor(sorted(draw(st.sets(st.integers(0, size - 1), max_size=60))), dtype=torch.int64)


@given(positions(), st.integers(1, 4), st.integers(0, 70), st.integers(0, 2**64 - 1),
       st.sampled_from([torch.float32, torch.float64]))  # fmt: skip
def test_best(places, levels, count, seed, dtype):
    scores = torch.randint(-levels, levels, places.shape).to(dtype)
    assert native.available()
    fast = index.best(scores, count, places, seed)
    assert torch.equal(fast, index.best_in_torch(scores, count, places, seed))
    assert int(fast.sum()) == min(count, places.numel())


_PATTERNS = {
    "random": torch.randn,
    "sorted": lambda n: torch.arange(n).float(),
    "constant": torch.zeros,
    "few levels": lambda n: torch.randint(4, (n,)).float(),
    "periodic": lambda n: (
        (torch.arange(n) % 30 == 0).float() + torch.randn(n) / 100
    ),  # misleads a regular sample
    "with infinities": lambda n: torch.randn(n).masked_fill_(torch.rand(n) < 0.2, float("inf")),
}


@pytest.mark.parametrize("pattern", _PATTERNS)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.7, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_of_many(pattern, share, dtype):
    torch.manual_seed(0)
    n = 30 * 1024
    scores = _PATTERNS[pattern](n).to(dtype)
    places = torch.arange(n) * 3
    fast = index.best_positions(scores, int(share * n), places, seed=1)
    assert torch.equal(fast, places[index.best_in_torch(scores, int(share * n), places, seed=1)])


@given(positions(), st.integers(-2, 70))
def test_best_positions(places, count):
    scores = torch.randn(places.shape)
    chosen = index.best_in_torch(scores, count, places, 0)
    assert torch.equal(index.best_positions(scores, count, places, 0), places[chosen])


@given(positions(), st.sampled_from([(20, 10), (1, 200), (200, 1), (5, 4, 5, 2)]))
def test_positions_of(places, shape):
    topology = Topology.from_positions(shape, places)
    assert torch.equal(index.positions_of(topology), places)
    assert torch.equal(topology.positions(), places)


@given(positions(), positions(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_moved(before, after, dtype):
    values = torch.randn(before.shape).to(dtype)
    source = index.indices_in(before, after)
    moved = index.moved(values, source)
    assert torch.equal(moved, index.moved_in_torch(values, source))
    held = dict(zip(before.tolist(), values.tolist(), strict=True))
    assert moved.tolist() == [held.get(place, 0.0) for place in after.tolist()]


def test_a_source_that_lies_outside_is_refused():
    with pytest.raises(IndexError, match="a source of 2 lies outside 2 weights"):
        index.moved(torch.ones(2), torch.tensor([0, 2]))


@given(positions(), positions())
def test_indices_in(before, after):
    assert torch.equal(index.indices_in(before, after), index.indices_in_torch(before, after))


@given(positions(), positions())
def test_merged(one, other):
    other = torch.tensor(sorted(set(other.tolist()) - set(one.tolist())), dtype=torch.int64)
    assert index.merged(one, other).tolist() == sorted(one.tolist() + other.tolist())


@given(positions(), st.sampled_from([(20, 10), (1, 200), (200, 1), (5, 4, 5, 2)]))
def test_topology_of(places, shape):
    fast, slow = index.topology_of(shape, places), Topology.from_positions(shape, places)
    assert fast.same_as(slow)
    assert fast.crow.dtype == slow.crow.dtype
    Topology(fast.shape, fast.crow, fast.col)  # and it would pass the checks that it was spared


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_uniform(first, count, seed):
    fast = index.uniform(first, count, seed, torch.device("cpu"))
    assert torch.equal(fast, chance.uniform(torch.arange(first, first + count), seed))


@given(positions(), positions())
def test_set_bits(one, other):
    fast, slow = torch.zeros(25, dtype=torch.uint8), torch.zeros(25, dtype=torch.uint8)
    for places in (one, other):
        index.set_bits(places, fast)
        index.set_bits_in_torch(places, slow)
    assert torch.equal(fast, slow)
    assert sum(int(byte).bit_count() for byte in fast) == len(set(one.tolist()) | set(other.tolist()))
