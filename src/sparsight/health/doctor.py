"""`sparsight doctor RUN…`: replay the rules on stored runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsight.dynamics.reading import load_run
from sparsight.dynamics.store import StoreError
from sparsight.health.diagnose import Episode, compare_runs, replay
from sparsight.health.report import as_json, as_text, must_act


def examine(runs: Sequence[Path], *, baseline: Path | None = None, as_data: bool = False) -> int:
    """Print what the rules find. Returns 0, 1 where something must be acted on, 2 where there is no run."""
    code, pages, data = 0, [], []
    for run in runs:
        try:
            history = load_run(run)
            beside = None if baseline is None else load_run(baseline)
        except StoreError as error:
            print(f"sparsight: {error}", file=sys.stderr)
            code = 2
            continue
        episodes = replay(history)
        if beside is not None:
            episodes += [Episode(f, f, f, True) for f in compare_runs(history, beside)]
        pages.append(as_text(str(run), history, episodes))
        data.append(as_json(str(run), history, episodes))
        code = max(code, int(must_act(episodes)))
    if as_data:
        print(json.dumps(data, indent=2, allow_nan=False))
    elif pages:
        print("\n\n".join(pages))
    return code
