"""What is tried: samples of an op, and layouts of their tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from .contenders import Place

# Sizes of op_db's samples: its own (uneven over four ranks, some below four), or ones that four ranks divide.
SIZES = {"uneven": {"L": 20, "M": 10, "S": 5, "XS": 3}, "even": {"L": 24, "M": 12, "S": 4, "XS": 2}}
MESHES = ((4,), (2, 2))
# Failures that say nothing about a library.
KNOWN = {
    "torch._scaled_mm": "float8 has no comparison on the CPU",
    "_segment_reduce.offsets": "its samples read past the end of their data with even sizes",
}
# Values are whatever memory holds.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Case:
    """One layout of one sample: the mesh, and the placements of each of its tensors, one per mesh axis."""

    sample: int
    mesh: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]

    def __str__(self) -> str:
        return " ".join(",".join(f"S{p}" if isinstance(p, int) else p for p in each) for each in self.places)


@dataclass(frozen=True)
class Sample:
    """One call of an op, its tensors apart: ``call(tensors)`` gives the arguments with these in their places."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    finish: Any  # what of the result is differentiated

    def call(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        following = iter(tensors)
        made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda x: next(following) if isinstance(x, torch.Tensor) else x, (self.args, self.kwargs)
        )
        return made


def op_name(op: OpInfo) -> str:
    """The name of an entry, with its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def set_sizes(which: str) -> None:
    """Sizes of the samples that are made from now on."""
    for name, size in SIZES[which].items():
        setattr(db, name, size)


def dtype_of(op: OpInfo, wanted: torch.dtype) -> torch.dtype | None:
    """What an op is run in.  An op without float32 is run in what it has; without another wanted dtype, not at all."""
    has = op.supported_dtypes("cpu")
    if wanted in has or not has or wanted is not torch.float32:
        return wanted if wanted in has else None
    return torch.int64 if torch.int64 in has else sorted(has, key=str)[0]


def samples(op: OpInfo, wanted: torch.dtype, most: int, seed: int) -> list[Sample]:
    """The first samples of an op that have a strided tensor in them."""
    dtype = dtype_of(op, wanted)
    if dtype is None:
        return []
    torch.manual_seed(seed)
    random.seed(seed)
    grad = bool(op.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    found = []
    for s in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), most):
        args, kwargs = (s.input, *s.args), dict(s.kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if tensors and all(t.layout is torch.strided for t in tensors):
            found.append(Sample(args, kwargs, tensors, s.output_process_fn_grad))
    return found


def layouts(tensors: Sequence[torch.Tensor], sample: int, most: int, seed: str) -> Iterator[Case]:
    """Layouts of these tensors: on four ranks in a row the usual ones, then drawn ones; on two by two; a Partial."""
    draw = random.Random(seed)
    dims: list[list[Place]] = [[d for d in range(t.dim()) if t.size(d) > 1] for t in tensors]
    options: list[list[Place]] = [["R", *d] for d in dims]
    none: tuple[Place, ...] = ("R",) * len(tensors)

    def all_at(k: int) -> tuple[Place, ...]:
        return tuple(d[k] if d else "R" for d in dims)

    def one(i: int, k: int) -> tuple[Place, ...]:
        return tuple(d[k] if j == i and d else "R" for j, d in enumerate(dims))

    row: list[tuple[Place, ...]] = [one(0, 0), all_at(0), one(0, -1), all_at(-1)]
    row += [one(i, 0) for i in range(1, len(tensors))]
    row += [tuple(draw.choice(o) for o in options) for _ in range(4 * most)]
    row = [r for r in dict.fromkeys(row) if r != none][:most]
    if sample == 0 or not row:
        row.append(none)
    for r in row:
        yield Case(sample, (4,), tuple((p,) for p in r))
    square: list[tuple[tuple[Place, ...], ...]] = []
    if len(dims[0]) > 1:
        square.append(((dims[0][0], dims[0][1]), *(("R", "R") for _ in tensors[1:])))
    elif dims[0] and tensors[0].size(int(dims[0][0])) >= 4:
        square.append(((dims[0][0], dims[0][0]), *(("R", "R") for _ in tensors[1:])))
    for _ in range(4 * most):
        square.append(tuple((draw.choice(o), draw.choice(o)) for o in options))
    for s in [s for s in dict.fromkeys(square) if any(p != ("R", "R") for p in s)][: (most + 1) // 2]:
        yield Case(sample, (2, 2), s)
    if tensors[0].dim() and (tensors[0].is_floating_point() or tensors[0].is_complex()):
        yield Case(sample, (4,), (("P",), *(("R",) for _ in tensors[1:])))


__all__ = [
    "KNOWN",
    "MESHES",
    "SIZES",
    "UNDEFINED",
    "Case",
    "Sample",
    "dtype_of",
    "layouts",
    "op_name",
    "samples",
    "set_sizes",
]
