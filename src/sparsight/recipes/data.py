"""Data sets from files on this machine. Nothing is downloaded."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DEBIAN = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
"""Where Debian's packages put a data set."""

HOW = {
    "fashion-mnist": "`apt install dataset-fashion-mnist`, or https://github.com/zalandoresearch/fashion-mnist",
    "mnist": "the four files of https://ossci-datasets.s3.amazonaws.com/mnist/",
    "multi30k": "https://github.com/multi30k/dataset (data/task1/raw), unpacked or not",
    "english": "a text with one sentence a line, and a file of labelled sentences such as SST-2 "
    "(https://dl.fbaipublicfiles.com/glue/data/SST-2.zip)",
}
"""The one command or link that gets a data set."""


def folder_of(name: str, path: Path | None = None) -> Path:
    """An explicit path, else the folder of that name under SPARSIGHT_DATA, else that of Debian's package."""
    if path is not None:
        if not path.is_dir():
            raise ValueError(f"no data for '{name}': there is no folder '{path}'")
        return path
    root = os.environ.get("SPARSIGHT_DATA")
    if root and (Path(root) / name).is_dir():
        return Path(root) / name
    if name in DEBIAN and DEBIAN[name].is_dir():
        return DEBIAN[name]
    tried = f"SPARSIGHT_DATA is {root}, which has no folder '{name}'" if root else "SPARSIGHT_DATA is not set"
    where = f"; it comes from {HOW[name]}" if name in HOW else ""
    raise ValueError(
        f"no data for '{name}': give a path, or set SPARSIGHT_DATA to the folder that holds '{name}/' "
        f"({tried}){where}"
    )


def read_idx(file: Path) -> Tensor:
    """One array in the IDX format of MNIST and its relatives, gzipped or not."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != 8:
        raise ValueError(f"{file} is not an IDX file of unsigned bytes")
    dims = content[3]
    shape = np.frombuffer(content, ">i4", dims, 4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dims)
    if values.size != np.prod(shape):
        raise ValueError(f"{file} promises {shape} values and holds {values.size}")
    return torch.from_numpy(values.reshape(shape).copy())


def images(name: str, path: Path | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; pixels in [0, 1], float32."""
    folder = folder_of(name, path)
    parts = []
    for split in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            found = sorted(folder.glob(f"{split}-{kind}-ubyte*"))
            if not found:
                raise ValueError(f"{folder} has no file {split}-{kind}-ubyte(.gz)")
            array = read_idx(found[0])
            parts.append(array.float() / 255 if "images" in kind else array.long())
    train_x, train_y, test_x, test_y = parts
    return train_x, train_y, test_x, test_y


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same four parts of the 1,797 digits of 8×8 pixels inside scikit-learn."""
    from sparsight.recipes.digits import load_digits

    data = load_digits()
    return data.train_x.view(-1, 8, 8), data.train_y, data.test_x.view(-1, 8, 8), data.test_y
