import importlib.util
import os
import sys

import pytest
import torch
from hypothesis import settings

# `make sanitize` runs the suite on kernels that it built apart.
if other := os.environ.get("SPARSIGHT_NATIVE"):
    spec = importlib.util.spec_from_file_location("sparsight.kernels._native", other)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])

# One example database-free, deterministic profile: the suite says the same thing every time it runs.
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """Tests that no browser ran are said aloud: a green suite without them means less."""
    missed = [r for r in terminalreporter.stats.get("skipped", []) if "chromium" in str(r.longrepr)]
    if missed:
        terminalreporter.write_line(
            f"NOT RUN for lack of a browser: {len(missed)} tests. Install it: apt-get install -y chromium",
            yellow=True,
            bold=True,
        )
