"""Text as bytes, and the windows that every rank draws alike."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from meshwright.errors import DataError
from meshwright.train import OptionError, TrainConfig
from meshwright.train.data import Corpus, Windows, load_corpus
from meshwright.train.subject import BuiltInModel
from meshwright.train.text import LIMIT, standard_library


def write(folder: Path, name: str, text: bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return str(path)


def test_files_follow_each_other(tmp_path: Path) -> None:
    files = [write(tmp_path, "b.txt", b"hello "), write(tmp_path, "a.txt", "wörld".encode())]
    corpus = load_corpus(files, 4)
    assert bytes(corpus.bytes.tolist()) == "hello wörld".encode()
    assert "12 bytes" in corpus.source
    assert corpus.digest() != load_corpus(files[::-1], 4).digest()


def test_standard_library_by_default() -> None:
    corpus = load_corpus((), 64)
    assert LIMIT / 10 < len(corpus) <= LIMIT
    assert corpus.digest() == load_corpus((), 64).digest()
    assert "Python's standard library" in corpus.source


def test_sources_are_sorted_and_cut(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c/a.py", "site-packages/x.py", "c/__pycache__/y.py", "note.txt"):
        write(tmp_path, name, name.encode())
    assert standard_library(tmp_path) == (b"a.pyb.pyc/a.py", "Python's standard library, 14 bytes")
    text, source = standard_library(tmp_path, limit=6)
    assert text == b"a.pyb."
    assert source == "Python's standard library, the first 6 bytes"


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no readable \.py files.*--data FILE"):
        standard_library(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "report"),
    [
        ("gone.txt", None, "there is no such file.*--data FILE"),
        ("empty.txt", b"", "is empty.*--data FILE"),
        ("short.txt", b"12345678", "8 bytes: too few for windows of --seq 8.*--seq 7 or less"),
        ("folder/x.txt", b"1", "is a folder: name the files in it"),
    ],
)
def test_bad_data_names_the_file_and_the_fix(tmp_path: Path, name: str, text: bytes | None, report: str) -> None:
    if text is not None:
        write(tmp_path, name, text)
    path = str(tmp_path / (name.split("/")[0]))
    with pytest.raises(DataError, match=report) as caught:
        load_corpus([path], 8)
    assert path in str(caught.value)


def test_unreadable_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may read everything: a mode would not do
    with pytest.raises(DataError, match=r"secret cannot be read \(Permission denied\)"):
        load_corpus([write(tmp_path, "secret", b"x")], 8)


def test_windows() -> None:
    windows = Windows(Corpus(torch.arange(100, dtype=torch.uint8), "numbers"), 5)
    assert len(windows) == 95
    for row in (0, 50, 94):
        x, y = windows[row]
        assert x.shape == y.shape == (5,)
        assert x.dtype == torch.int64
        assert torch.equal(x, torch.arange(row, row + 5))
        assert torch.equal(y, x + 1)


def test_batches_depend_on_the_seed_alone() -> None:
    def batches(seed: int) -> list[torch.Tensor]:
        config = TrainConfig(batch=2, seq=16, seed=seed)
        return [x for x, _ in itertools.islice(BuiltInModel(config, corpus).batches(), 3)]

    corpus = load_corpus((), 16)
    torch.manual_seed(1)
    first = batches(7)
    torch.manual_seed(2)
    torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(first, batches(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, batches(8), strict=True))


def test_too_few_windows_for_a_batch() -> None:
    corpus = Corpus(torch.arange(9, dtype=torch.uint8), "nine")
    with pytest.raises(OptionError, match="nine has 1 windows"):
        BuiltInModel(TrainConfig(batch=4, seq=8), corpus)
