"""Image classification: an MLP or a small ResNet on digits, Fashion-MNIST, MNIST, or any IDX files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sparsight.recipes.knobs import Paths, Weights
from sparsight.recipes.training import Tap, Training


def image(
    *,
    data: Literal["digits", "fashion-mnist", "mnist"] = "digits",
    path: Path | None = None,
    network: Literal["mlp", "resnet"] = "mlp",
    width: int = 0,
    depth: int = 0,
    steps: int = 0,
    batch: int = 128,
    lr: float = 2e-3,
    seed: int = 0,
    weights: Weights = Weights(),
    paths: Paths = Paths(),
) -> Training:
    """Classify images with an MLP or a small ResNet.

    Args:
        data: Digits come with scikit-learn, 8×8 pixels; the others are read from IDX files, 28×28.
        path: Folder of the IDX files; by default SPARSIGHT_DATA, then Debian's package.
        network: What learns.
        width: Units of a layer, or channels of the first stage; 0 chooses 256 for an MLP, 16 for a ResNet.
        depth: Residual blocks, or blocks of each stage; 0 chooses 2 for an MLP, 1 for a ResNet.
        steps: Optimizer steps; 0 chooses 600 for an MLP, 200 for a ResNet.
        batch: Images of a step.
        lr: Highest learning rate of AdamW.
        seed: Of the weights, the topology and the order of the data.
        weights: Sparse weights.
        paths: Sparse paths.
    """
    import torch
    from torch import Tensor
    from torch.nn import functional

    from sparsight.recipes import loop, vision
    from sparsight.recipes.data import digits, images

    steps = steps or (600 if network == "mlp" else 200)
    width = width or (256 if network == "mlp" else 16)
    depth = depth or (2 if network == "mlp" else 1)
    loop.check_positive("image", width=width, depth=depth, steps=steps, batch=batch, lr=lr)
    if data == "digits" and path is not None:
        raise ValueError("image: digits come with scikit-learn; a path needs --data fashion-mnist or mnist")
    train_x, train_y, test_x, test_y = digits() if data == "digits" else images(data, path)
    mean, std = train_x.mean(), train_x.std()
    train_x, test_x = (((x - mean) / std)[:, None] for x in (train_x, test_x))
    classes = int(train_y.max()) + 1

    torch.manual_seed(seed)
    model: torch.nn.Module
    if network == "mlp":
        model = vision.mlp(train_x[0].numel(), classes, width=width, depth=depth, paths=paths)
    else:
        model = vision.ResNet(1, classes, width=width, depth=depth, paths=paths)
    optimizer = loop.adamw(model, lr)
    tap = Tap()

    def losses(i: int) -> Tensor:
        rows = loop.rows_of(len(train_x), batch, seed, i)
        return functional.cross_entropy(model(train_x[rows]), train_y[rows], reduction="none")

    def step(i: int) -> Mapping[str, float]:
        each = losses(i)
        tap(each.detach())
        return {"loss": loop.update(model, optimizer, each.mean(), loop.learning_rate(lr, i, steps))}

    def evaluate() -> Mapping[str, float]:
        logits = torch.cat([model(part) for part in test_x.split(500)])
        right = (logits.argmax(1) == test_y).double().mean().item()
        return {"accuracy": right, "test_loss": functional.cross_entropy(logits, test_y).item()}

    parts = weights.apply(model, optimizer, steps=steps, seed=seed, loss=lambda: losses(0).mean())
    paths.follow(model, optimizer)
    known = loop.fingerprint(train_x, train_y, test_x, test_y)
    return Training(model, optimizer, steps, step, evaluate, parts, tap, known, "accuracy")
