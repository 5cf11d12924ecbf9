"""Loaders, on small files made here."""

import gzip
import struct

import numpy as np
import pytest
import torch

from sparsight.recipes.data import folder_of, images, read_idx


def write_idx(path, array):
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_images_of_both_kinds_of_files(tmp_path, monkeypatch):
    folder = tmp_path / "small"
    folder.mkdir()
    pictures = np.arange(2 * 3 * 3).reshape(2, 3, 3)
    for split, ending in (("train", ".gz"), ("t10k", "")):
        write_idx(folder / f"{split}-images-idx3-ubyte{ending}", pictures)
        write_idx(folder / f"{split}-labels-idx1-ubyte{ending}", np.array([4, 7]))
    monkeypatch.setenv("SPARSIGHT_DATA", str(tmp_path))
    train_x, train_y, test_x, test_y = images("small")
    assert torch.equal(train_x, torch.tensor(pictures).float() / 255)
    assert train_y.tolist() == test_y.tolist() == [4, 7]
    assert torch.equal(images("small", folder)[2], test_x)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSIGHT_DATA", raising=False)
    with pytest.raises(ValueError, match="no data for 'mnist': give a path, or set SPARSIGHT_DATA"):
        folder_of("mnist")
    monkeypatch.setenv("SPARSIGHT_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="has no folder 'mnist'"):
        folder_of("mnist")
    with pytest.raises(ValueError, match=r"has no file train-images-idx3-ubyte\(.gz\)"):
        images("mnist", tmp_path)
    (tmp_path / "odd").write_bytes(b"hello world")
    with pytest.raises(ValueError, match="is not an IDX file"):
        read_idx(tmp_path / "odd")
    write_idx(tmp_path / "short", np.zeros((4, 4)))
    (tmp_path / "short").write_bytes((tmp_path / "short").read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"promises \[4, 4\] values and holds 13"):
        read_idx(tmp_path / "short")
