"""Text as bytes, and random windows of it that are the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

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


class Windows(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless global batches of random windows: (bytes, the bytes that follow), each int64 ``[batch, seq]``.

    The generator is its own: the batches depend on the arguments alone, not on the rank or on other draws.
    """

    def __init__(self, corpus: Corpus, batch: int, seq: int, seed: int) -> None:
        self.corpus, self.batch, self.seq, self.seed = corpus, batch, seq, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        within = torch.arange(self.seq + 1)
        while True:
            starts = torch.randint(len(self.corpus) - self.seq, (self.batch, 1), generator=generator)
            window = self.corpus.bytes[starts + within].long()
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
