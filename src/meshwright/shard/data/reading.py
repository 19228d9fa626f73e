"""Reading a rank's own rows of a batch: what torch's DataLoader gets as dataset and as sampler.

Random transforms draw numbers that belong to a row.  So ranks that read the same row get the same values, and where a
dataset is read row by row every mesh does.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from .order import RowOrder, mix

Tensor = torch.Tensor
WATCHED = 16  # batches at first after which the generators of Python and numpy are looked at
EVERY = 128  # and then every so many: to copy their states takes as long as to read some rows
Bounds = Callable[[int], tuple[int, int]]  # of a batch's number of rows: which of them are this rank's


class RowPart(NamedTuple):
    """A rank's part of a batch: row numbers, whether there are any (else one row tells the form), and a seed."""

    rows: list[int]
    holds: bool
    key: int


class Read(NamedTuple):
    """What was read: the rank's part, and how many rows the whole batch has (None: the sampler knows)."""

    batch: Any
    size: int | None


@dataclass
class Position:
    """Where the next batch begins: the sampler reads it when a pass begins."""

    epoch: int = 0
    row: int = 0


class Parts(Sampler[RowPart]):
    """Yields this rank's part of each batch, from a position to the end of its epoch."""

    def __init__(
        self, position: Position, order: RowOrder, size: int, drop_last: bool, bounds: Bounds, seed: int
    ) -> None:  # fmt: skip
        self.position, self.order, self.size, self.drop_last = position, order, size, drop_last
        self.bounds, self.seed = bounds, seed

    def __len__(self) -> int:
        return self.order.rows // self.size if self.drop_last else -(-self.order.rows // self.size)

    def __iter__(self) -> Iterator[RowPart]:
        epoch, first, full = self.position.epoch, self.position.row, self.bounds(self.size)
        key = mix(self.seed, epoch, 1)
        while (count := self.count(first)) > 0:
            start, stop = full if count == self.size else self.bounds(count)
            rows = self.order.at(epoch, first + start, first + stop)
            # A rank without rows reads one and keeps none of it: that tells it keys, dtypes and shapes.
            yield RowPart(rows or self.order.at(epoch, first, first + 1), bool(rows), key)
            first += count

    def count(self, first: int) -> int:
        """Rows of the batch that begins at a row; 0 at the end."""
        left = self.order.rows - first
        return 0 if left < self.size and self.drop_last else max(0, min(self.size, left))


class DatasetRows(Dataset[Any]):
    """Reads and collates parts of a map-style dataset.

    Seeding generators for every row costs more than reading most rows.  So they are seeded once the dataset was seen to
    draw: what it drew is put back, and the part is read again.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate
        self.draws, self.count = False, 0

    def __getitems__(self, part: RowPart) -> Any:
        """The collated rows of a part (torch's DataLoader calls it with what the sampler yields)."""
        if self.draws:
            with undisturbed():
                return self._read(part, seed_all)
        watched = self.count < WATCHED or self.count % EVERY == 0
        self.count += 1
        default, others = torch.default_generator.get_state(), _states() if watched else None
        read = self._read(part, None)
        if default.equal(torch.default_generator.get_state()) and (others is None or not _moved(others)):
            return read
        _restore(default, others)
        if self.count > WATCHED:
            seen = max(WATCHED, self.count - EVERY)
            warnings.warn(
                f"shard_dataloader: the dataset began to draw random numbers after {seen} batches or "
                "more: of those before this one, ranks that read the same row may have drawn others",
                stacklevel=2,
            )
        self.draws = True
        return self.__getitems__(part)

    def _read(self, part: RowPart, seed: Callable[[int], Any] | None) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:  # one call for all: no seed for each row
            if seed is not None:
                seed(mix(part.key, part.rows[0]))
            rows = many(part.rows)
        elif seed is None:
            rows = [self.dataset[row] for row in part.rows]
        else:
            rows = []
            for row in part.rows:
                seed(mix(part.key, row))
                rows.append(self.dataset[row])
        batch = self.collate(rows)
        return Read(batch if part.holds else emptied(batch), None)


class Stream(IterableDataset[Read]):
    """Reads an iterable dataset to its end, and keeps and collates this rank's rows of each batch."""

    def __init__(
        self, dataset: Iterable[Any], position: Position, size: int, drop_last: bool, bounds: Bounds,
        collate: Callable[[list[Any]], Any], seed: int,
    ) -> None:  # fmt: skip
        self.dataset, self.position, self.size, self.drop_last = dataset, position, size, drop_last
        self.bounds, self.collate, self.seed = bounds, collate, seed

    def __iter__(self) -> Iterator[Read]:
        epoch, first = self.position.epoch, self.position.row
        if (tell := getattr(self.dataset, "set_epoch", None)) is not None:
            tell(epoch)
        skip = getattr(self.dataset, "skip", None)
        key = mix(self.seed, epoch)
        rows = iter(self.dataset if not first else skip(first) if skip else islice(self.dataset, first, None))
        here = get_worker_info() is None
        while True:
            with undisturbed() if here else nullcontext():
                seed_all(mix(key, first))
                held = list(islice(rows, self.size))
                if not held or (len(held) < self.size and self.drop_last):
                    return
                start, stop = self.bounds(len(held))
                batch = self.collate(held[start:stop] or held[:1])
            yield Read(batch if start < stop else emptied(batch), len(held))
            first += len(held)


def emptied(batch: Any) -> Any:
    """A batch of one row without it."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return like_mapping(batch, {key: emptied(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(emptied, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(emptied(value) for value in batch if not isinstance(value, (str, bytes)))
    return batch


def like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """The items as a mapping of the same class; as a dict where that takes something else."""
    if type(value) is dict:
        return items
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


# ---------------------------------------------------------------------------------------------- generators


def seed_all(seed: int) -> None:
    """Seed the generators that transforms draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave no trace of what is drawn inside in the generators of this process."""
    default, others = torch.random.get_rng_state(), _states()
    try:
        yield
    finally:
        _restore(default, others)


def _states() -> tuple[Any, Any]:
    """Of the generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _moved(before: tuple[Any, Any]) -> bool:
    """Whether one of them was drawn from: the place in its words, or the words, are others."""
    (_, words, gauss), array = _states()
    (_, old, before_gauss), old_array = before
    if (words[-1], words[0], gauss) != (old[-1], old[0], before_gauss):
        return True
    return array is not None and (array[2:] != old_array[2:] or array[1][0] != old_array[1][0])


def _restore(default: Tensor, others: tuple[Any, Any] | None) -> None:
    torch.random.set_rng_state(default)
    if others is not None:
        random.setstate(others[0])
        if others[1] is not None:
            sys.modules["numpy"].random.set_state(others[1])


__all__ = ["DatasetRows", "Parts", "Position", "Read", "RowPart", "Stream", "emptied", "like_mapping"]
