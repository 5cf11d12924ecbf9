"""From what a person typed to a recipe: one of ours by name, or any function in a file of theirs."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from sparsight.recipes.training import Training

Recipe = Callable[..., Training]

OURS = ("image", "language", "translation", "electra")


def ours() -> dict[str, Recipe]:
    """Our own recipes by name. None of their modules imports torch before the recipe is called."""
    return {name: getattr(import_module(f"sparsight.recipes.{name}"), name) for name in OURS}


def find(name: str) -> Recipe:
    """`image`, or `path/to/mine.py:recipe`.

    >>> find("image").__name__
    'image'
    >>> try:
    ...     find("imgae")
    ... except ValueError as error:
    ...     print(str(error)[:55])
    there is no recipe 'imgae'; did you mean 'image'? There
    """
    if name in OURS:
        return ours()[name]
    if ".py" not in name and ":" not in name:
        raise ValueError(
            f"there is no recipe '{name}'{nearest(name, OURS)} There are {', '.join(OURS)}, "
            "and your own as path/to/file.py:function"
        )
    file, _, function = name.rpartition(":") if ":" in name else (name, "", "")
    return _from_file(Path(file), function)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names, or a full stop."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else "."


def reference(name: str) -> str:
    """The same recipe from any working directory: files by their absolute path."""
    file, colon, function = name.rpartition(":")
    return f"{Path(file).resolve()}{colon}{function}" if colon else name


def _from_file(file: Path, function: str) -> Recipe:
    if not file.is_file():
        raise ValueError(f"there is no file '{file}' to take a recipe from")
    module = _load(file)
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    if not function:
        raise ValueError(
            f"which function of '{file}' is the recipe? Say {file}:function; "
            f"it has {', '.join(own) or 'none'}"
        )
    if function not in own:
        raise ValueError(
            f"'{file}' has no function '{function}'{nearest(function, own)} It has {', '.join(own) or 'none'}"
        )
    recipe = own[function]
    for name, knob in inspect.signature(recipe).parameters.items():
        if knob.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise ValueError(
                f"{file}:{function}: knobs are keyword-only arguments, and '{name}' is not; "
                f"write def {function}(*, {name}, ...)"
            )
        if knob.annotation is inspect.Parameter.empty or knob.default is inspect.Parameter.empty:
            raise ValueError(f"{file}:{function}: knob '{name}' needs a type and a default")
    return recipe


def _load(file: Path) -> ModuleType:
    # Beside other modules of its folder, as if it had been started as a script.
    name = f"sparsight_recipe_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"'{file}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations look their module up
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}") from None
    return module


def free(folder: Path, name: str) -> Path:
    """runs/image, or runs/image-2 where that is taken."""
    run, number = folder / name, 1
    while run.exists():
        number += 1
        run = folder / f"{name}-{number}"
    return run
