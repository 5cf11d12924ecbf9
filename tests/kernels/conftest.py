"""What tests of the kernels share: every instruction set of this machine, left as it was found."""

import pytest
import torch

from sparsight.kernels import native
from sparsight.kernels.native import INSTRUCTION_SETS, isa_available, isa_force

ISAS = [name for name in INSTRUCTION_SETS if isa_available(name)]
CLOSE = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-3}}

each_isa = pytest.mark.parametrize("name", ISAS)


@pytest.fixture(autouse=True)
def _restored():
    before, threads = native.isa(), torch.get_num_threads()
    yield
    isa_force(before)
    torch.set_num_threads(threads)
