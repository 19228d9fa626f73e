"""The order of a dataset's rows as a function of epoch, place and seed: computed, never listed."""

from __future__ import annotations

from functools import lru_cache

import torch

Tensor = torch.Tensor

SORTED = 1 << 16  # up to so many rows the order sorts hashes: a small Feistel network is no shuffle
BLOCK = 1 << 13  # places computed at once: a call per batch would cost more than reading the batch
ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to 63 bits (SplitMix64), the same in every process and version."""
    x = 0
    for number in numbers:
        x = (x ^ (number & _MASK)) + _GOLDEN & _MASK
        x = (x ^ x >> 30) * _M1 & _MASK
        x = (x ^ x >> 27) * _M2 & _MASK
        x ^= x >> 31
    return x >> 1


def place_to_row(places: Tensor, rows: int, key: int) -> Tensor:
    """Permute `places` (int64, below `rows`) by the permutation of `rows` numbers that belongs to `key`."""
    return _sorted(rows, key)[places] if rows <= SORTED else _walked(places, rows, key)


class RowOrder:
    """Rows of a dataset in the order in which epochs read them.

    Args:
        rows: Number of rows.
        seed: Seed of the permutations; None keeps the order of the dataset.
    """

    def __init__(self, rows: int, seed: int | None) -> None:
        self.rows, self.seed = rows, seed
        self._block: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def at(self, epoch: int, first: int, last: int) -> list[int]:
        """Rows at the places `first` to `last` of an epoch."""
        if self.seed is None:
            return list(range(first, last))
        index = first // BLOCK
        if self._block[0] == (epoch, index) and last <= (index + 1) * BLOCK:
            return self._block[1][first - index * BLOCK : last - index * BLOCK]
        listed: list[int] = []
        while first < last:
            index = first // BLOCK
            start = index * BLOCK
            stop = min(last, start + BLOCK)
            listed += self._computed(epoch, index)[first - start : stop - start]
            first = stop
        return listed

    def _computed(self, epoch: int, index: int) -> list[int]:
        if self._block[0] != (epoch, index):
            assert self.seed is not None
            places = torch.arange(index * BLOCK, min(self.rows, (index + 1) * BLOCK))
            self._block = (epoch, index), place_to_row(places, self.rows, mix(self.seed, epoch)).tolist()
        return self._block[1]


@lru_cache(4)
def _sorted(rows: int, key: int) -> Tensor:
    return _hashed(torch.arange(rows), key).argsort(stable=True)


def _walked(places: Tensor, rows: int, key: int) -> Tensor:
    """A Feistel network on the next power of two, applied until the row is below `rows`: twice on average at most."""
    bits = (rows - 1).bit_length()
    high, low = bits // 2, bits - bits // 2
    keys = [mix(key, i) for i in range(ROUNDS)]
    row = _permuted(places, high, low, keys)
    while bool((outside := row >= rows).any()):
        row[outside] = _permuted(row[outside], high, low, keys)
    return row


def _permuted(x: Tensor, high: int, low: int, keys: list[int]) -> Tensor:
    a, b = x >> low, x & (1 << low) - 1
    for i, key in enumerate(keys):
        if i % 2:
            b = b ^ _hashed(a, key) & (1 << low) - 1
        else:
            a = a ^ _hashed(b, key) & (1 << high) - 1
    return a << low | b


def _hashed(x: Tensor, key: int) -> Tensor:
    """SplitMix64 of tensors of int64, which wrap as unsigned numbers do."""
    x = x + _signed(key * 2 + 1)
    x = (x ^ _shifted(x, 30)) * _signed(_M1)
    x = (x ^ _shifted(x, 27)) * _signed(_M2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return x >> bits & (1 << 64 - bits) - 1


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


__all__ = ["RowOrder", "mix", "place_to_row"]
