"""Text as bytes, and the windows of it as rows of a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .text import load_text


@dataclass(frozen=True)
class Corpus:
    """Text as one sequence of bytes.

    Attributes:
        bytes: uint8, one dim.
        source: where it comes from, in words.
    """

    bytes: Tensor
    source: str

    def __len__(self) -> int:
        return self.bytes.numel()

    def digest(self) -> str:
        """The same on all ranks exactly if the text is."""
        return hashlib.sha256(self.bytes.numpy().tobytes()).hexdigest()[:16]


def load_corpus(files: Sequence[str], seq: int) -> Corpus:
    """The text of these files, as :func:`load_text` reads it."""
    text, source = load_text(files, seq)
    return Corpus(torch.frombuffer(bytearray(text), dtype=torch.uint8), source)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Row i is the window at byte i: (bytes, the bytes that follow), each int64 ``[seq]``."""

    def __init__(self, corpus: Corpus, seq: int) -> None:
        self.corpus, self.seq, self.digest = corpus, seq, corpus.digest()

    def __len__(self) -> int:
        return len(self.corpus) - self.seq

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        window = self.corpus.bytes[row : row + self.seq + 1].long()
        return window[:-1], window[1:]
