"""Stores of made-up runs, written fast, with numbers that a test can foresee."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import numpy as np

from sparsight.dynamics.records import Event, Record
from sparsight.dynamics.store import FILE, Store

META = {
    "config": {"recipe": "language", "lr": 0.001, "seed": 0},
    "seed": 0,
    "versions": {"sparsight": "0.1.0", "torch": "2.13.0", "python": "3.11"},
    "machine": {"cpu": "two cores", "system": "Linux"},
    "started": "2026-01-01T00:00:00",
}


def layers(moe: int, sparse: int, experts: int) -> list[dict[str, object]]:
    return [{"name": f"blocks.{i}.mlp", "family": "moe", "experts": experts, "k": 1} for i in range(moe)] + [
        {
            "name": f"blocks.{i}.attn",
            "family": "sparse",
            "shape": [128, 64],
            "storage": "compressed",
            "map": [16, 8],
        }
        for i in range(sparse)
    ]


def records(
    step: int, last: int, *, moe: int = 2, sparse: int = 2, experts: int = 8, seed: int = 0
) -> list[Record]:
    """The reading of one step of a run in which the first layer's router collapses towards the end."""
    rng = np.random.default_rng([step, seed])
    done = step / last
    loss = 4.2 * np.exp(-3 * done) + 0.6 + 0.08 * rng.standard_normal()
    found = [
        Record(step, "log/loss", "", float(loss)),
        Record(
            step, "log/accuracy", "", float(0.92 - 0.8 * np.exp(-4 * done) + 0.01 * rng.standard_normal())
        ),
        Record(step, "run/time", "", step * 0.02),
        Record(step, "run/step_seconds", "", 0.02 + 0.001 * abs(rng.standard_normal())),
    ]
    for i in range(moe):
        where = f"blocks.{i}.mlp"
        ill = max(0.0, done - 0.5) * 2 if i == 0 else 0.0
        share = np.ones(experts) * (1 - ill) + 0.15 * rng.random(experts)
        share[0] += ill * experts
        found.append(Record(step, "moe/tokens_per_expert", where, (1000 * share).astype(np.float32)))
        f = share / share.sum()
        entropy = float(-(f * np.log(f)).sum() / np.log(experts))
        found += [
            Record(step, "moe/load_entropy", where, entropy),
            Record(step, "moe/router_entropy", where, 0.9 - 0.5 * done - 0.35 * ill),
            Record(step, "moe/max_vio", where, float(share.max() / share.mean() - 1)),
            Record(step, "moe/dead_expert_frac", where, float(ill > 0.6) * 0.5),
            Record(step, "moe/drop_rate", where, 0.02 + 0.2 * ill),
            Record(step, "moe/gate_saturation", where, 0.05 + 0.8 * ill),
            Record(step, "moe/gate_top1_prob", where, 0.4 + 0.3 * done + 0.25 * ill),
            Record(step, "moe/routing_mi", where, 0.8 * done),
            Record(step, "moe/similarity", where, 0.2 + 0.1 * i),
            Record(step, "moe/update_freq", where, np.clip(share, 0, 1).astype(np.float32)),
        ]
    for i in range(sparse):
        where = f"blocks.{i}.attn"
        drop = 0.3 * (1 + np.cos(np.pi * min(done / 0.75, 1))) / 2
        grid = np.clip(0.1 + 0.06 * np.sin(np.arange(128) / (5 + i) + 6 * done), 0, 1)
        found += [
            Record(step, "sparse/density", where, 0.08 + 0.05 * i),
            Record(step, "sparse/churn", where, float(drop)),
            Record(step, "sparse/itop_rate", where, float(0.1 + 0.3 * (1 - np.exp(-2 * done)) / (i + 1))),
            Record(step, "sparse/survival", where, (0.9 ** np.arange(1, 6) - 0.1 * i).astype(np.float32)),
            Record(step, "sparse/dead_neurons", where, 0.01 * i),
            Record(step, "sparse/dead_inputs", where, 0.02),
            Record(
                step,
                "sparse/update_freq",
                where,
                np.array([1, 0, 0, 1, 2, 3, 5, 8, 20, 60], np.float32) / 100,
            ),
            Record(step, "sparse/effective_lr", where, 0.8 + 0.4 * i),
            Record(step, "sparse/grad_norm", where, float(0.5 + 0.1 * i + 0.05 * rng.random())),
            Record(step, "sparse/topology_map", where, grid.astype(np.float32)),
        ]
    if moe:
        for name in ("load_entropy", "router_entropy", "dead_expert_frac", "gate_saturation", "drop_rate"):
            values = [float(r.value) for r in found if r.name == f"moe/{name}"]
            found.append(Record(step, f"moe/{name}", "", float(np.mean(values))))
    if sparse:
        found += [
            Record(step, "sparse/flops_ratio", "", 0.22),
            Record(step, "sparse/density", "", 0.105),
            Record(step, "sparse/itop_rate", "", float(0.1 + 0.2 * done)),
        ]
    return found


FINDING = Event(
    700,
    "finding",
    "expert_collapse",
    "act",
    "blocks.0.mlp",
    "Expert 0 of blocks.0.mlp gets 62 % of the tokens, and the share has grown for 200 steps.",
    {"onset": 520, "experts": [0]},
    time=14.0,
)
ACTION = Event(
    720, "action", "raise_balance", "info", "blocks.0.mlp", "Balance coefficient 0.01 → 0.05.", {}, time=14.4
)


def small(folder: Path, *, steps: int = 1000, every: int = 10, seed: int = 0, **sizes: int) -> Path:
    """A run of a hundred readings with a finding and an action."""
    meta = {**META, "seed": seed, "config": {**META["config"], "seed": seed}}
    counts = {"moe": 2, "sparse": 2, "experts": 8, **sizes}
    store = Store(folder, {**meta, "layers": layers(counts["moe"], counts["sparse"], counts["experts"])})
    for step in range(every, steps + 1, every):
        store.append(records(step, steps, seed=seed, **counts))
    store.event(FINDING)
    store.event(ACTION)
    store.close()
    return folder


def large(folder: Path, *, steps: int = 100_000, every: int = 10, moe: int = 12, experts: int = 64) -> Path:
    """A long run of a large model, written past the store's own writer to be there in seconds."""
    Store(folder, {**META, "layers": layers(moe, 0, experts)}).close()
    rng = np.random.default_rng(0)
    at = range(every, steps + 1, every)
    count = len(at)
    connection = sqlite3.connect(folder / FILE)
    connection.execute("PRAGMA synchronous = OFF")
    with connection:
        add = connection.executemany
        number = 0

        def series(name: str, place: str) -> int:
            nonlocal number
            number += 1
            connection.execute("INSERT INTO series VALUES (?, ?, ?)", (number, name, place))
            return number

        def scalar(name: str, place: str, values: np.ndarray) -> None:
            id_ = series(name, place)
            add("INSERT INTO scalar VALUES (?, ?, ?)", zip([id_] * count, at, values.tolist(), strict=True))

        noise = rng.standard_normal(count) * 0.05
        done = np.linspace(0, 1, count)
        scalar("log/loss", "", 4 * np.exp(-3 * done) + 1 + noise)
        scalar("run/time", "", np.asarray(at) * 0.01)
        scalar("run/step_seconds", "", 0.01 + abs(noise) / 50)
        per_layer = ("router_entropy", "load_entropy", "max_vio", "dead_expert_frac", "drop_rate",
                     "gate_saturation", "gate_top1_prob", "routing_mi", "similarity")  # fmt: skip
        for name in per_layer:
            scalar(f"moe/{name}", "", np.clip(0.5 + noise, 0, 1))
            for layer in range(moe):
                scalar(f"moe/{name}", f"blocks.{layer}.mlp", np.clip(0.4 + layer / 40 + noise, 0, 1))
        for name in ("tokens_per_expert", "update_freq"):
            for layer in range(moe):
                id_ = series(f"moe/{name}", f"blocks.{layer}.mlp")
                blobs = rng.random((count, experts), np.float32)
                blobs *= 1000 if name == "tokens_per_expert" else 1
                rows = ((id_, step, row.tobytes()) for step, row in zip(at, blobs, strict=True))
                add("INSERT INTO vector VALUES (?, ?, ?)", rows)
        columns = "step, time, kind, rule, severity, place, message, data"
        event = f"INSERT INTO event ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        add(
            event,
            [
                (
                    s,
                    s * 0.01,
                    "finding",
                    "overload",
                    "warn",
                    "blocks.3.mlp",
                    f"Overload at {s}.",
                    json.dumps({}),
                )
                for s in range(5000, steps, 5000)
            ],
        )
    connection.close()
    return folder


if __name__ == "__main__":
    import sys

    begin = time.perf_counter()
    print(large(Path(sys.argv[1])), f"{time.perf_counter() - begin:.1f} s")
