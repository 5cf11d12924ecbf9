"""Small networks for images. Their feed-forward blocks may be mixtures of experts."""

from __future__ import annotations

from torch import Tensor, nn

from sparsight.recipes.knobs import Paths


class Residual(nn.Module):
    """x + block(norm(x))."""

    def __init__(self, dim: int, hidden: int, paths: Paths) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.block = paths.block(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        return x + self.block(self.norm(x))  # type: ignore[no-any-return]


def mlp(pixels: int, classes: int, *, width: int, depth: int, paths: Paths) -> nn.Module:
    """One layer in, `depth` residual blocks, one layer out. A token is an image."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, width),
        nn.GELU(),
        *(Residual(width, 2 * width, paths) for _ in range(depth)),
        nn.LayerNorm(width),
        nn.Linear(width, classes),
    )


class _Basic(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.first_norm(self.first(x)))
        return nn.functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem and three stages of `depth` basic blocks, a feed-forward block at each position, one layer out.

    A token is a position of the last feature map.
    """

    def __init__(self, channels: int, classes: int, *, width: int, depth: int, paths: Paths) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages = []
        inside = width
        for stage in range(3):
            out = width * 2**stage
            for block in range(depth):
                stages.append(_Basic(inside, out, 2 if stage and not block else 1))
                inside = out
        self.stages = nn.Sequential(*stages)
        self.mix = Residual(inside, 2 * inside, paths)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, height, width] → [N, classes]."""
        positions = self.stages(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.mix(positions).mean(1))  # type: ignore[no-any-return]
