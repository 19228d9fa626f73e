"""What a kind of collective is: one description that running, recording, checking, pricing and explaining read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..layout import Wire, wire_bytes, wire_from
from .transport import resized

Tensor = torch.Tensor
ADDS = ("sum", "avg")  # reductions that add up
FEW_RANKS = 8  # a sum over more ranks is warned of where it is made
BITS = 11  # in fewer bits of significand, the hidden one counted: float16 has them, bfloat16 has 8


@lru_cache
def rounds(dtype: torch.dtype, ranks: int) -> bool:
    """Whether a sum over this many ranks loses what counts in this dtype."""
    return ranks > FEW_RANKS and dtype.is_floating_point and 1 - math.log2(torch.finfo(dtype).eps) < BITS


@dataclass(frozen=True)
class Cut:
    """A dim along which ranks of the group have parts.

    Attributes:
        dim, sizes: names of the options that say which dim, and the length of each rank's part.
        verb: what happens to the dim, for messages.
        joins: the parts come together; else the tensor is cut into them.
        table: both, as a table says: in row i and column j, how much the i-th rank sends to the j-th.
    """

    dim: str
    sizes: str
    verb: str
    joins: bool = False
    table: bool = False

    def before(self, sizes: Sequence[int], n: int, index: int) -> int:
        """Length of the dim before, on the rank at a place of a group of ``n``."""
        if self.table:
            return sum(sizes[index * n : (index + 1) * n])
        return sizes[index] if self.joins else sum(sizes)

    def after(self, sizes: Sequence[int], n: int, index: int) -> int:
        """Length of the dim afterwards."""
        if self.table:
            return sum(sizes[index::n])
        return sum(sizes) if self.joins else sizes[index]


@dataclass(frozen=True)
class Kind:
    """A kind of collective.

    Of its options, ``op`` is a reduction, ``index`` this rank's place in the group, and ``wire`` the name of the format
    in which parts travel.

    Attributes:
        name: ``"all_reduce"``...
        options: the operator's options between the tensor and the group, as in its schema.
        run: ``run(x, *options, group)`` meets the others and returns the result.
        start: the same without waiting: a ``Pending``; None where there is none.
        start_writes: the started one works in the memory of its input.
        cuts: the dims that it joins or cuts.
        passes: how often (n-1)/n of what a rank brings, and of what it ends with, passes it in the ring model.
        whole: all of it passes each rank, and not (n-1)/n.
    """

    name: str
    options: str
    run: Callable[..., Tensor]
    start: Callable[..., Any] | None = None
    start_writes: bool = False
    cuts: tuple[Cut, ...] = ()
    passes: tuple[int, int] = (1, 0)
    whole: bool = False

    def __str__(self) -> str:
        return self.name

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the options, in order."""
        return tuple(o.split()[-1] for o in self.options.split(", "))

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the options that are tensors: they tell how much of what ``bytes`` says is sent."""
        return tuple(o.split()[-1] for o in self.options.split(", ") if o.startswith("Tensor "))

    @property
    def reduces(self) -> bool:
        """Whether it sums, or reduces otherwise."""
        return "op" in self.names

    def named(self, options: Sequence[Any]) -> dict[str, Any]:
        """The options by name."""
        return dict(zip(self.names, options, strict=True))

    def shape(self, given: Sequence[int], options: Sequence[Any]) -> tuple[int, ...]:
        """Shape of the result from that of the input."""
        by_name, made = self.named(options), tuple(given)
        for cut in self.cuts:
            sizes = by_name[cut.sizes]
            n = math.isqrt(len(sizes)) if cut.table else len(sizes)
            made = tuple(resized(made, by_name[cut.dim], cut.after(sizes, n, by_name.get("index", 0))))
        return made

    def padded(self, given: Sequence[int], options: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """Shape of the input and options as backends other than gloo run it: parts of one dim padded to the longest."""
        by_name, shape = self.named(options), tuple(given)
        if len(self.cuts) == 1 and not self.cuts[0].table and by_name.get("wire") is None:
            cut = self.cuts[0]
            sizes = by_name[cut.sizes]
            if not cut.joins or sum(map(bool, sizes)) > 1:  # what one rank has whole is broadcast
                even = by_name[cut.sizes] = [max(sizes)] * len(sizes)
                shape = resized(shape, by_name[cut.dim], cut.before(even, len(even), 0))
        return shape, [by_name[name] for name in self.names]

    def format(self, dtype: torch.dtype, options: Sequence[Any]) -> Wire:
        """In what a tensor of this dtype travels: in the option ``wire``, where there is one."""
        wire = self.named(options).get("wire")
        return dtype if wire is None else wire_from(wire)

    def sent(self, shape: Sequence[int], dtype: torch.dtype, options: Sequence[Any]) -> int:
        """Bytes of what a rank brings as it travels; nothing where it sends to itself."""
        said = self.named(options)
        if "targets" in said and said["targets"][said["index"]] == said["index"]:
            return 0
        return self._travelling(shape, dtype, options, joins=False)

    def got(self, shape: Sequence[int], dtype: torch.dtype, options: Sequence[Any]) -> int:
        """Bytes of what a rank ends with as it travelled, from the shape of what it brings."""
        return self._travelling(self.shape(shape, options), dtype, options, joins=True)

    def _travelling(self, shape: Sequence[int], dtype: torch.dtype, options: Sequence[Any], joins: bool) -> int:
        """Parts that a whole is cut into, or joined from, are encoded each by itself."""
        wire, said = self.format(dtype, options), self.named(options)
        cuts = () if wire is dtype else [c for c in self.cuts if c.joins is joins]
        parts = [resized(shape, said[c.dim], n) for c in cuts for n in said[c.sizes]] or [tuple(shape)]
        return sum(wire_bytes(wire, math.prod(part)) for part in parts)

    @property
    def scatters(self) -> bool:
        """Whether each rank gets a part of what is reduced."""
        return self.reduces and bool(self.cuts)

    @property
    def wired(self) -> bool:
        """Whether what it sends travels in a format of its own; what is added up is added up in float32."""
        return "wire" in self.names

    @property
    def staged(self) -> bool:
        """Whether the wait for one that was started runs another collective: all ranks must wait in one order."""
        return self.wired and not self.cuts

    def bytes(self, before: int, after: int, n: int) -> int:
        """Bytes that pass each of ``n`` ranks, from those of what it brings and of what it ends with."""
        passed = self.passes[0] * before + self.passes[1] * after
        return passed if self.whole else (n - 1) * passed // n


__all__ = ["ADDS", "Cut", "Kind", "rounds"]
