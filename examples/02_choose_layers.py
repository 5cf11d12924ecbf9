"""Which layers are sparse, and how many weights each one owns. Nothing is trained here."""

from torch import nn

import sparsight as sp


def make(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def main(*, width: int = 32, density: float = 0.2) -> None:
    choices = {
        "everything, ERK": {},
        "head kept dense": {"keep_dense": ["5"]},
        "only the convolutions": {"include": ["[02]"]},
        "uniform, first layer dense": {"distribution": sp.uniform()},
        "uniform, all of them": {"distribution": sp.uniform(first_dense=False)},
        "ER, kernels left out": {"distribution": sp.er()},
        "by name": {"distribution": {"0": 1.0, "5": 0.5}},
    }
    for title, arguments in choices.items():
        sparse = sp.sparsify(make(width), density=density, method=sp.static(), **arguments)
        layers = "  ".join(f"{name}: {t.nnz}/{t.size}" for name, t in sparse.topologies.items())
        print(f"{title:<28} density {sparse.density:.3f}   {layers}")

    # A name that does not exist is an error that says which ones do.
    try:
        sp.sparsify(make(width), density=density, method=sp.static(), keep_dense=["head"])
    except ValueError as error:
        print(f"\nValueError: {error}")


if __name__ == "__main__":
    main()
