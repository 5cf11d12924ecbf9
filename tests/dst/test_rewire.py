"""Properties of rewire over odd shapes, ties, and blocks of any size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsight as sp
from sparsight import chance
from sparsight.dst.rewire import Fill, Quota, rewire
from sparsight.dst.structures import NM, Block, ConstantFanIn, Unstructured
from sparsight.kernels.index import best, best_of_blocks, best_of_blocks_in_torch


@st.composite
def layers(draw):
    """A layer of any shape with any number of weights, and scores that are full of ties or of none."""
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    size = rows * columns
    nnz = draw(st.integers(1, size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    positions = torch.randperm(size, generator=generator)[:nnz].sort().values
    topology = sp.Topology.from_positions((rows, columns), positions)
    levels = draw(st.sampled_from([1, 2, 4, 10_000]))  # 1: all equal (all-zero gradients)
    values = torch.randint(levels, (nnz,), generator=generator).float() - levels // 2
    gradient = torch.randint(levels, (size,), generator=generator).float() - levels // 2
    return sp.LayerView("layer", topology, values, seed=draw(st.integers(0, 99)), dense_grad=gradient)


def by_sorting(view: sp.LayerView, keep: int, grow: int) -> set[int]:
    """The same choice by one plain sort of tuples: score first, hash of the position second."""

    def order(position: int, score: float) -> tuple[float, int]:
        return (-score, int(chance.hashes(torch.tensor([position]), view.seed)))

    existing = view.topology.positions().tolist()
    values = dict(zip(existing, view.values.abs().tolist(), strict=True))
    kept = set(sorted(existing, key=lambda p: order(p, values[p]))[:keep])
    scores = view.dense_grad.abs().tolist()
    others = [p for p in range(view.topology.size) if p not in kept]
    return kept | set(sorted(others, key=lambda p: order(p, scores[p]))[:grow])


@given(layers(), st.floats(0, 1))
def test_rewire_keeps_the_count_exact_and_takes_the_best(view, fraction):
    nnz = view.topology.nnz
    count = int(fraction * nnz)
    done = rewire(
        view, sp.criteria.magnitude, sp.criteria.gradient, Quota(nnz - count, count), Unstructured()
    )
    assert done.after.nnz == nnz
    assert set(done.after.positions().tolist()) == by_sorting(view, nnz - count, count)
    assert done.dropped == done.grown <= count
    # `source` points every surviving weight to its old place, and no other.
    old, new = view.topology.positions(), done.after.positions()
    for place, source in zip(new.tolist(), done.source.tolist(), strict=True):
        assert (source == -1) == (place not in old.tolist())
        if source >= 0:
            assert int(old[source]) == place


@given(layers())
def test_a_rewiring_of_nothing_is_the_same_topology(view):
    quota = Quota(view.topology.nnz, 0)
    done = rewire(view, sp.criteria.magnitude, sp.criteria.gradient, quota, Unstructured())
    assert done.after.same_as(view.topology)
    assert done.grown == done.dropped == 0


@given(layers(), st.integers(1, 40), st.floats(0, 1))
def test_a_streamed_score_gives_the_same_choice_for_any_block(view, block, fraction):
    size = view.topology.size
    count = int(fraction * (size - view.topology.nnz))
    kept = view.topology.positions()
    scores = view.dense_grad.abs()
    whole = best_of_blocks(kept, iter([(0, scores)]), count, view.seed)
    pieces = list(zip(range(0, size, block), scores.split(block), strict=True))
    for search in (best_of_blocks, best_of_blocks_in_torch):
        assert search(kept, iter(pieces), count, view.seed).tolist() == whole.tolist()
    assert whole.numel() == count
    assert not set(whole.tolist()) & set(kept.tolist())


@pytest.mark.parametrize("count", [1, 50, 3000, 30_000, 70_000])
@pytest.mark.parametrize("levels", [2, 7, 0])
def test_a_search_through_many_scores_agrees_with_the_slow_twin(count, levels):
    """Large enough for the guessed floor, with scores that tie (levels) or rise towards the end."""
    scores = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    scores = scores.mul(levels).floor() if levels else scores + torch.linspace(0, 5, scores.numel())
    kept = torch.arange(0, scores.numel(), 7)
    pieces = list(zip(range(0, scores.numel(), 40_000), scores.split(40_000), strict=True))
    found = best_of_blocks(kept, iter(pieces), count, 3)
    assert torch.equal(found, best_of_blocks_in_torch(kept, iter(pieces), count, 3))
    assert torch.equal(found, best_of_blocks(kept, iter([(0, scores)]), count, 3))


@given(layers(), st.integers(0, 5))
def test_ties_do_not_all_go_to_the_first_rows(view, seed):
    """With all scores equal the choice is spread by the hash, and is the same each time."""
    scores = torch.zeros(400)
    chosen = best(scores, 100, torch.arange(400), seed)
    assert int(chosen.sum()) == 100
    assert torch.equal(chosen, best(scores, 100, torch.arange(400), seed))
    assert 5 < int(chosen[:100].sum()) < 50


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.data())
def test_blocks_stay_whole_and_counted(tall, wide, rows, cols, data):
    structure = Block(rows, cols)
    shape = (tall * rows, wide * cols)
    size = shape[0] * shape[1]
    total = structure.feasible(shape, data.draw(st.integers(1, size)))
    view, done = swap(shape, total, structure, data)
    del view
    units = done.after.mask().view(tall, rows, wide, cols).sum((1, 3)).flatten()
    assert set(units.tolist()) <= {0, rows * cols}
    assert done.after.nnz == total


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_n_of_m_holds_in_every_group(out, groups, m, data):
    n = data.draw(st.integers(1, m))
    structure = NM(n, m)
    shape = (out, groups * m)
    _, done = swap(shape, structure.feasible(shape, 1), structure, data)
    assert torch.all(done.after.mask().view(out, groups, m).sum(2) == n)


@given(st.integers(1, 8), st.integers(1, 9), st.floats(0, 1), st.data())
def test_fan_in_is_constant_over_living_neurons(rows, fan_in, saliency, data):
    structure = ConstantFanIn(saliency)
    total = structure.feasible((rows, fan_in), data.draw(st.integers(1, rows * fan_in)))
    _, done = swap((rows, fan_in), total, structure, data)
    widths = done.after.crow.diff()
    living = widths[widths > 0]
    assert len(set(living.tolist())) == 1
    assert total - len(living) < done.after.nnz <= total


def swap(shape, total, structure, data):
    """A first topology of this structure at random, then one swap of a random fraction."""
    seed = data.draw(st.integers(0, 1000))
    places = torch.arange(shape[0] * shape[1])
    first = structure.fill(
        None, places[:0], iter([(places, chance.uniform(places, seed))]), Fill(shape, total, seed)
    )
    topology = sp.Topology.from_positions(shape, first)
    assert topology.nnz == total
    generator = torch.Generator().manual_seed(seed)
    view = sp.LayerView(
        "layer",
        topology,
        torch.randn(total, generator=generator),
        seed,
        dense_grad=torch.randn(places.numel(), generator=generator),
    )
    unit = structure.rows * structure.cols if isinstance(structure, Block) else 1
    count = int(data.draw(st.floats(0, 1)) * total) // unit * unit
    quota = Quota(total - count, count)
    return view, rewire(view, sp.criteria.magnitude, sp.criteria.gradient, quota, structure)


def test_positions_hash_to_splitmix64():
    """Against the published generator: the first outputs of splitmix64 seeded with 0."""
    golden = 0x9E3779B97F4A7C15
    signed = golden - (1 << 64)
    places = torch.tensor([signed, 2 * golden - (2 << 64) + (1 << 64)])
    flipped = [int(h) ^ -(1 << 63) for h in chance.hashes(places, 0)]
    assert [h & ((1 << 64) - 1) for h in flipped] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_uniform_numbers_are_uniform():
    numbers = chance.uniform(torch.arange(100_000), seed=7)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 45  # χ², 19 degrees of freedom: p ≈ 0.001
