import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsight import Topology


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_mask_survives_the_way_there_and_back(rows, columns, seed):
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.4
    topology = Topology.from_mask(mask)
    assert torch.equal(topology.mask(), mask)
    assert topology.nnz == int(mask.sum())
    for row in range(rows):
        own = topology.col[topology.crow[row] : topology.crow[row + 1]]
        assert own.tolist() == mask[row].nonzero().flatten().tolist()
    assert Topology.from_positions(topology.shape, topology.positions()).same_as(topology)


def test_a_convolution_is_seen_as_rows_of_its_whole_kernel():
    mask = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    mask[1, 2, 0, 1] = True
    topology = Topology.from_mask(mask)
    assert (topology.rows, topology.fan_in) == (2, 12)
    assert topology.col.tolist() == [2 * 4 + 1]
    assert torch.equal(topology.mask(), mask)


def test_full_and_empty():
    assert Topology.full((3, 4)).density == 1
    empty = Topology.from_positions((3, 4), torch.empty(0, dtype=torch.int64))
    assert empty.nnz == 0
    assert not empty.mask().any()


@pytest.mark.parametrize(
    ("crow", "col", "message"),
    [
        (i32(0, 1, 2), i32(0, 4), r"columns must lie in \[0, 4\), got 0 to 4"),
        (i32(0, 1, 2), i32(0, -1), r"columns must lie in \[0, 4\), got -1 to 0"),
        (i32(0, 2, 2), i32(2, 1), "sorted and distinct"),
        (i32(0, 2, 2), i32(1, 1), "sorted and distinct"),
        (i32(0, 2), i32(1, 2), "crow must have 3 entries"),
        (i32(0, 2, 1), i32(1, 2), "crow must rise from 0 to 2"),
        (i32(1, 2, 2), i32(1, 2), "crow must rise from 0 to 2"),
        (i32(0, 3, 2), i32(1, 2), "crow must rise"),
        (torch.tensor([0, 1, 1]), i32(1), "crow must be a vector of int32"),
        (i32(0, 1, 1), torch.tensor([1.0]), "col must be a vector of int32"),
    ],
)
def test_a_malformed_topology_is_refused_at_construction(crow, col, message):
    with pytest.raises(ValueError, match=message):
        Topology((2, 4), crow, col)
