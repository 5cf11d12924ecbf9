"""`sp.show`: the charts of a run in a notebook, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from sparsight.dynamics.history import History

POINTS = 400


@dataclass(frozen=True)
class Figures(Mapping[str, Any]):
    """Plotly figures by name. A notebook shows them all; `figures["loss"]` is one of them."""

    figures: Mapping[str, go.Figure]

    def __getitem__(self, name: str) -> go.Figure:
        """One figure."""
        if name not in self.figures:
            raise KeyError(f"there is no figure {name!r}; this run has {', '.join(self.figures)}")
        return self.figures[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of the page."""
        return iter(self.figures)

    def __len__(self) -> int:
        """How many."""
        return len(self.figures)

    def _ipython_display_(self) -> None:
        for figure in self.figures.values():
            figure.show()


def show(run: Path | str | History | Any, *, layer: str | None = None) -> Figures:
    """The charts of a run: its folder, a history, or the `watch` that writes it.

    `layer` is the one that the charts of a single layer show; the first where none is named.

    >>> import tempfile
    >>> from sparsight.dynamics.records import Record
    >>> from sparsight.dynamics.store import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder) / "run")
    ...     store.append([Record(step, "log/loss", "", 1 / step) for step in (1, 2, 4)])
    ...     store.close()
    ...     figures = show(Path(folder) / "run")
    >>> list(figures), figures["loss"].data[0].y.tolist()
    (['loss'], [1.0, 0.5, 0.25])
    """
    try:
        from sparsight.report.figures import CHARTS, titled
    except ImportError as error:
        raise ImportError(f"show needs the extra: pip install 'sparsight[app]' ({error})") from None
    history = _history(run)
    found = ((chart, chart.figure(history, layer)) for chart in CHARTS)
    return Figures({chart.id: titled(figure, chart) for chart, figure in found if figure is not None})


def _history(run: Any) -> History:
    from sparsight.dynamics.history import History
    from sparsight.dynamics.sampling import sample

    if isinstance(run, History):
        return run
    folder = run if isinstance(run, str | Path) else getattr(run, "run", None)
    if folder is None:
        raise ValueError(
            f"show: expected the folder of a run, a history or a watch, got {type(run).__name__}"
        )
    if (store := getattr(run, "store", None)) is not None:
        store.flush()
    return sample(folder, points=POINTS)
