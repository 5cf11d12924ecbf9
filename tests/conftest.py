import pytest
import torch
from hypothesis import settings

# One example database-free, deterministic profile: the suite says the same thing every time it runs.
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)
