"""Data sets from files on this machine. Nothing is downloaded."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def folder_of(name: str, path: Path | None = None) -> Path:
    """An explicit path, else the folder of that name under SPARSIGHT_DATA."""
    if path is not None:
        return path
    root = os.environ.get("SPARSIGHT_DATA")
    if not root:
        raise ValueError(
            f"no data for '{name}': give a path, or set SPARSIGHT_DATA to the folder that holds '{name}/'"
        )
    folder = Path(root) / name
    if not folder.is_dir():
        raise ValueError(f"SPARSIGHT_DATA is {root}, which has no folder '{name}'")
    return folder


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
