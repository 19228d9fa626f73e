"""Batches padded to a few sizes, so that captured steps and plans are made for those alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ShardError

Tensor = torch.Tensor
Path = tuple[Any, ...]
_LEFT = object()


@dataclass(frozen=True)
class Padding:
    """Which dim of which tensors is padded, up to which sizes (ascending) and with what.

    ``values``: key of the batch, or place in a tuple or list, to the value behind its end, None to leave it as it is;
    or the value for batches of one tensor.
    """

    sizes: tuple[int, ...]
    dim: int
    values: Any

    @staticmethod
    def of(pad_to: Any, dim: Any, values: Any) -> Padding | None:
        """What the arguments of ``shard_dataloader`` say.  Raises ShardError where they say nothing sensible."""
        if pad_to is None:
            if values is not None:
                raise ShardError("shard_dataloader: pad_value is given and pad_to is not: to which sizes?")
            return None
        if not isinstance(pad_to, (Sequence, set)) or not pad_to or not all(type(n) is int and n > 0 for n in pad_to):
            raise ShardError(f"shard_dataloader: pad_to={pad_to!r}: the sizes to pad to, e.g. pad_to=[128, 256, 512]")
        if type(dim) is not int:
            raise ShardError(f"shard_dataloader: pad_dim={dim!r}: the number of a dim was expected")
        if values is None:
            raise ShardError(
                "shard_dataloader: say what each tensor is padded with, and leave none to chance, e.g. pad_value="
                '{"input_ids": 0, "attention_mask": 0, "labels": -100}; for a batch of one tensor pad_value=0'
            )
        return Padding(tuple(sorted(set(pad_to))), dim, values)

    def lengths(self, tensors: Sequence[tuple[Path, Tensor]]) -> dict[Path, int]:
        """The size of each tensor that is to be padded, by its path in the batch.

        Raises ShardError where not just the tensors with that dim are named: labels that nobody thought of would be
        too short, or count.  It hangs on no size, so that all ranks raise it.
        """
        for path, t in tensors:
            self._check_value(self._value(path), t, path)
        if not isinstance(self.values, Mapping):
            if len(tensors) != 1:
                names = ", ".join(f"{path[-1]!r}: ..." for path, _ in tensors)
                raise ShardError(
                    f"shard_dataloader: pad_value={self.values!r} is for batches with one tensor that has a dim "
                    f"{self.dim}, this one has {len(tensors)}: name them, pad_value={{{names}}}"
                )
            return {path: t.shape[self.dim] for path, t in tensors}
        for key in self.values:
            if not any(key in path for path, _ in tensors):
                raise ShardError(
                    f"shard_dataloader: pad_value names {key!r}, and the batch has no tensor of that name with a dim "
                    f"{self.dim}"
                )
        for path, _ in tensors:
            if self._value(path) is _LEFT:
                raise ShardError(
                    f"shard_dataloader: batch{shown(path)} has a dim {self.dim}, and pad_value does not name it: say "
                    "what it is padded with, or None to leave it as it is"
                )
        return {path: t.shape[self.dim] for path, t in tensors if self._value(path) is not None}

    def _check_value(self, value: Any, t: Tensor, path: Path) -> None:
        """Padding of another value than was asked for would be silent: -100 is 156 in uint8, and True in bool."""
        if value is None or value is _LEFT:
            return
        try:
            held = torch.tensor(value).to(t.dtype).item()
            if t.dtype.is_floating_point or t.dtype.is_complex:  # rounded as everywhere, but never to infinity
                fits = (held == held, abs(held) == math.inf) == (value == value, abs(value) == math.inf)
            else:
                fits = held == value
        except (TypeError, ValueError, RuntimeError, OverflowError):
            fits = False
        if not fits:
            raise ShardError(f"shard_dataloader: batch{shown(path)} is {t.dtype} and cannot hold pad_value {value!r}")

    def _value(self, path: Path) -> Any:
        if not isinstance(self.values, Mapping):
            return self.values
        return next((self.values[k] for k in reversed(path) if k in self.values), _LEFT)

    def padded(self, t: Tensor, path: Path, length: int | None) -> Tensor:
        """A tensor of at most this length padded to the next of the sizes; None: as it is."""
        if length is None:
            return t
        size = next((n for n in self.sizes if n >= length), None)
        if size is None:
            raise ShardError(
                f"shard_dataloader: batch{shown(path)} has {length} along dim {self.dim}, pad_to goes up to "
                f"{self.sizes[-1]}: add a size, or cut the data"
            )
        after = t.ndim - 1 - self.dim % t.ndim  # dims behind the one that is padded
        value = self._value(path)
        return torch.constant_pad_nd(t, [0, 0] * after + [0, size - t.shape[self.dim]], value)

    def applies(self, t: Tensor) -> bool:
        """Whether a tensor has the dim."""
        return -t.ndim <= self.dim < t.ndim


def shown(path: Path) -> str:
    """The place of a tensor in a batch, as one writes it."""
    return "".join(f"[{k!r}]" for k in path)
