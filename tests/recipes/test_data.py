"""Loaders, on small files made here."""

import numpy as np
import pytest
import torch

from sparsight.recipes import data
from sparsight.recipes.data import folder_of, images, read_idx
from sparsight.recipes.text import aligned, english, read_labelled, read_text, standard_library
from tests.recipes.conftest import write_idx, write_images


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
    monkeypatch.setattr(data, "DEBIAN", {})
    with pytest.raises(ValueError, match="no data for 'mnist': give a path, or set SPARSIGHT_DATA"):
        folder_of("mnist")
    monkeypatch.setenv("SPARSIGHT_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="has no folder 'mnist'"):
        folder_of("mnist")
    with pytest.raises(ValueError, match=r"has no file train-images-idx3-ubyte\(.gz\)"):
        images("mnist", tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        images("mnist", tmp_path / "nowhere")
    (tmp_path / "odd").write_bytes(b"hello world")
    with pytest.raises(ValueError, match="is not an IDX file"):
        read_idx(tmp_path / "odd")
    write_idx(tmp_path / "short", np.zeros((4, 4)))
    (tmp_path / "short").write_bytes((tmp_path / "short").read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"promises \[4, 4\] values and holds 13"):
        read_idx(tmp_path / "short")


@pytest.mark.parametrize(
    ("name", "gets_it"),
    [
        ("fashion-mnist", "apt install dataset-fashion-mnist"),
        ("mnist", "https://ossci-datasets"),
        ("multi30k", "https://github.com/multi30k/dataset"),
        ("english", "https://dl.fbaipublicfiles.com/glue"),
    ],
)
def test_the_message_says_how_to_get_the_data(name, gets_it, monkeypatch):
    monkeypatch.delenv("SPARSIGHT_DATA", raising=False)
    monkeypatch.setattr(data, "DEBIAN", {})
    with pytest.raises(ValueError, match="SPARSIGHT_DATA is not set") as caught:
        folder_of(name)
    assert gets_it in str(caught.value)


def test_an_explicit_path_comes_first_then_the_variable_then_debian(tmp_path, monkeypatch):
    package, own = write_images(tmp_path / "package"), write_images(tmp_path / "own" / "fashion-mnist")
    monkeypatch.setattr(data, "DEBIAN", {"fashion-mnist": package})
    monkeypatch.delenv("SPARSIGHT_DATA", raising=False)
    assert folder_of("fashion-mnist") == package
    monkeypatch.setenv("SPARSIGHT_DATA", str(tmp_path / "own"))
    assert folder_of("fashion-mnist") == own
    assert folder_of("fashion-mnist", tmp_path) == tmp_path
    monkeypatch.setenv("SPARSIGHT_DATA", str(tmp_path / "package"))
    assert folder_of("fashion-mnist") == package


def test_the_standard_library_is_a_text():
    text = standard_library(5000)
    assert len(text) == 5000
    assert "import" in text


def test_files_that_do_not_fit(tmp_path):
    def file(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    short, long = file("short", b"a\nb\n"), file("long", b"a\nb\nc\n")
    with pytest.raises(ValueError, match=r"has 2 lines and .* 3: line n must be the translation"):
        aligned(short, long, None, None)
    with pytest.raises(ValueError, match="source and target come together"):
        aligned(short, None, None, None)
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_text(file("latin", "Größe".encode("latin-1")))
    with pytest.raises(ValueError, match="there is no text file"):
        read_text(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="line 2: expected a sentence, a tab and a class"):
        read_labelled(file("bad", b"fine\t1\nnot fine\n"))
    with pytest.raises(ValueError, match="has no labelled sentence"):
        read_labelled(file("empty", b""))
    cola = read_labelled(file("cola", b"gj04\t1\t\tIt is.\ngj04\t0\t*\tIs it is.\n"))
    assert (cola.sentences, cola.classes.tolist()) == (["It is.", "Is it is."], [1, 0])
    with pytest.raises(ValueError, match="needs labelled beside it"):
        english(long, "sst2", None, short)
