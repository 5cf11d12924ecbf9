"""What a run folder says about itself (run.json): the recipe and its knobs, so that it can be made again."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sparsight.recipes.find import Recipe, find, nearest

FILE = "run.json"


@dataclass(frozen=True)
class Stored:
    """Which recipe, with which knobs and options, made by which version."""

    recipe: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def write(run: Path, stored: Stored) -> None:
    """Into the run folder, which is made where it is missing."""
    run.mkdir(parents=True, exist_ok=True)
    content = json.dumps(dataclasses.asdict(stored), indent=2, default=_plain).encode()
    replace_file(run / FILE, lambda stream: stream.write(content))


def read(run: Path) -> Stored:
    """From the run folder."""
    file = run / FILE
    if not run.is_dir():
        raise ValueError(f"there is no run folder '{run}'{_neighbours(run)}")
    if not file.is_file():
        raise ValueError(f"'{run}' has no {FILE}, so it is no run of `sparsight train`")
    try:
        content = json.loads(file.read_bytes())
        return Stored(**{f.name: content[f.name] for f in dataclasses.fields(Stored)})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}' cannot be read: {error}") from None


def flat(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Names and plain values without groups, as the command line shows them."""
    plain = json.loads(json.dumps(knobs, default=_plain_or_fields))
    listed: dict[str, Any] = {}
    for name, value in plain.items():
        listed.update(value if isinstance(value, dict) else {name: value})
    return listed


def knobs_of(recipe: Recipe, stored: Stored) -> dict[str, Any]:
    """The stored knobs as the recipe takes them."""
    hints = typing.get_type_hints(recipe, include_extras=False)
    hints.pop("return", None)
    for name in stored.knobs:
        if name not in hints:
            raise ValueError(
                f"the recipe '{stored.recipe}' has no knob '{name}', which this run was made with by "
                f"sparsight {stored.versions.get('sparsight', '?')}{nearest(name, hints)}"
            )
    return {name: _value(hints[name], value) for name, value in stored.knobs.items()}


def recipe_of(stored: Stored) -> Recipe:
    """The recipe that a run was made by."""
    return find(stored.recipe)


def replace_file(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader, or a crash, finds the old one or the new one and nothing between."""
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def _plain_or_fields(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return _plain(value)


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())  # a run goes on from any working directory
    raise ValueError(
        f"a knob of type {type(value).__name__} cannot be stored for --resume; use numbers, texts, paths, "
        "tuples and dataclasses of them"
    )


def _value(hint: Any, value: Any) -> Any:
    """JSON knows no paths, tuples and dataclasses; the type says which it was."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return typing.cast(Any, hint)(**{name: _value(hints[name], part) for name, part in value.items()})
    if hint is Path:
        return Path(value)
    return tuple(value) if isinstance(value, list) else value


def _neighbours(run: Path) -> str:
    there = sorted(p.name for p in run.parent.iterdir() if p.is_dir()) if run.parent.is_dir() else []
    return nearest(run.name, there) if there else ""
