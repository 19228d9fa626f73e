"""``torch.associative_scan`` along a dim that stays split: parts are scanned at once and pass on what they come to.

PyTorch computes it of slices with a stride of two, under ``torch.vmap``, which below a distributed tensor would be
this rank's rows alone.  As a call of its own each rank scans its rows, one row of each part before is brought, and what
these come to is combined with each row: what is sent does not depend on how long the sequence is (Blelloch, Prefix
Sums and Their Applications, 1990).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from .. import torch_changes
from ..compat import TorchDispatchMode, tree_leaves
from ..errors import DispatchError
from ..operators import GIVEN, KEPT, internal, opaque_operator, part_of
from .dims import nothing, with_row
from .factor_notation import Arg, Local, LocalFn, Rule, composite, notation, rule
from .users_function import on_parts

Tensor = torch.Tensor


class Combine:
    """A function that combines two rows, each of several tensors: ``combine(*earlier, *later)``.

    One plan serves all of them: of what they do it knows ``pointwise`` alone, which is an argument of the call.
    """

    def __init__(self, fn: Callable[..., Any], more: Sequence[Tensor] = ()) -> None:
        self.fn, self.more = fn, more

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Combine)

    def __hash__(self) -> int:
        return hash(Combine)

    def __repr__(self) -> str:
        return "combine_fn"

    def __call__(self, *rows: Tensor) -> list[Tensor]:
        if not len(rows[0]):  # of two rows PyTorch's scan combines none more, which not all functions can
            return list(rows[len(rows) // 2 :])
        fix = "make it one of xs (expanded to their length), or apply it before or after the scan"
        made: list[Tensor] = tree_leaves(on_parts(self.fn, rows, "associative_scan: combine_fn", fix))
        given, found = [x.dtype for x in rows[len(rows) // 2 :]], [x.dtype for x in made]
        if given != found:  # the first row stays as it is, so ranks would have different types
            raise DispatchError(
                f"associative_scan: combine_fn makes {found} of rows of {given}: convert xs before the scan, or cast "
                "what it returns back"
            )
        return made

    def scan(self, xs: Sequence[Tensor], short: bool = False) -> list[Tensor]:
        """The scan of rows that are all here.

        Args:
            xs: the rows, of each tensor.
            short: some rank has so few rows that less is computed of them than of many.
        """
        if all(x.numel() for x in xs):
            made: list[Tensor] = _SCAN[0](self, list(xs), additional_inputs=tuple(self.more))
        else:  # of rows without elements PyTorch's own loses some
            made, short = list(xs), True
        return [_tied(*of) for of in zip(made, self.of_many(_one_row(xs, xs)), strict=True)] if short else made

    def of_many(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """What a scan makes of many such rows: each result of all that it can be made of."""
        made = list(rows)
        for _ in rows:
            made = self(*made, *rows)
        return made

    def is_pointwise(self, xs: Sequence[Tensor]) -> bool:
        """Whether each element of a row is made of the same element of two rows, so that other dims can be split."""
        if any(x.shape != xs[0].shape for x in xs) or self.more:
            return False
        rows = [torch.empty((1, *x.shape[1:]), dtype=x.dtype, device="meta") for x in (*xs, *xs)]
        seen = _Ops()
        try:
            with torch.no_grad(), seen:
                self.fn(*rows)
        except Exception:  # it will be told where there are values
            return False
        return seen.pointwise


def _one_row(like: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """A row of each tensor, of numbers as they are in ``like``, that is in the graph of ``xs`` and has no gradient.

    Ranks differ in what they make of parts: those without rows, and the first, combine nothing.  All of them combine
    such rows beside it, so that graphs of gradients, of any order, are the same on all.
    """
    made = []
    for x, rows in zip(xs, like, strict=True):
        row = rows[-1:].detach()
        if not len(rows):
            row = rows.new_zeros((1, *rows.shape[1:]))
            if row.is_floating_point() or row.is_complex():
                row += torch.arange(row.numel(), device=row.device).square().cos().view_as(row) / 2 + 1
        made.append(with_row(x[:0], 0) + row)
    return made


def _tied(x: Tensor, *others: Tensor) -> Tensor:
    """A result that is in the graph of others."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.cat([x, *(o[:0] for o in others)])
    return x - nothing((), x, *others)  # minus keeps the sign of a zero


class _Ops(TorchDispatchMode):
    """Sees whether all ops are pointwise and none has a tensor from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.pointwise = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        elsewhere = [a for a in args if isinstance(a, Tensor) and a.device.type != "meta" and a.ndim]
        self.pointwise &= torch.Tag.pointwise in func.tags and not elsewhere
        return func(*args, **(kwargs or {}))


_SCAN: list[Callable[..., Any]] = []  # PyTorch's own, once there is a mesh


@torch_changes.replace(
    "torch._higher_order_ops.associative_scan.generic_associative_scan",
    why="associative_scan works under torch.vmap, which would take a rank's rows for all: it is a call with a rule",
)
def _scanning(original: Any, name: str) -> Any:
    _SCAN[:] = [original]

    @functools.wraps(original)
    def generic_associative_scan(operator: Any, leaves: Any, dim: int = 0, additional_inputs: Any = ()) -> Any:
        if dim or not has_torch_function(leaves):
            return original(operator, leaves, dim, additional_inputs)
        combine = Combine(operator, additional_inputs)
        return list(associative_scan_rows(combine, combine.is_pointwise(leaves), *leaves))

    return generic_associative_scan


@part_of("associative_scan")
@internal
def associative_scan_rows(combine: Combine, pointwise: bool, *xs: Tensor) -> tuple[Tensor, ...]:
    """The scan along the first dim."""
    return tuple(combine.scan(xs))


def _whole(xs: Sequence[Tensor], combine: int, pointwise: bool) -> list[Tensor]:
    return list(associative_scan_rows(GIVEN.made[combine], pointwise, *xs))


_WHOLE = opaque_operator("associative_scan(Tensor[] xs, int combine, bool pointwise) -> Tensor[]", _whole)
composite("meshwright::associative_scan")(_whole)


def _kept(combine: Combine, pointwise: bool, *xs: Tensor) -> list[Tensor]:
    GIVEN.made.append(combine)
    made: list[Tensor] = _WHOLE(xs, len(GIVEN.made) - 1, pointwise)
    return made


KEPT[associative_scan_rows] = _kept


@rule("associative_scan_rows")
def _rows_rule(combine: Combine, pointwise: bool, *xs: Arg) -> Rule:
    """Other dims are free where ``combine`` is pointwise; along the first parts pass on what they come to."""
    t = xs[0].shape[0]
    names = [["t", *([f"d{d}" if pointwise else f"x{i}d{d}" for d in range(1, x.ndim)])] for i, x in enumerate(xs)]

    def local(ctx: Local) -> LocalFn:
        if not ctx.is_split("t"):
            return associative_scan_rows.fn
        sizes = [stop - start for start, stop in ctx.spans("t")]
        filled = [p for p, size in sorted(zip(ctx.parts("t"), sizes, strict=True)) if size]
        at = {p: i for i, p in enumerate(filled)}
        places = [at.get(p) for p in ctx.parts("t")]
        own, axes = places[ctx.place_in("t")], ctx.axes("t")
        held = [[] if i is None else [(i, i + 1)] for i in places]
        wanted = [[(0, i)] if i else [] for i in places]
        why = "each part of a scan begins with what the parts before it come to"

        def run(combine: Combine, pointwise: bool, *xs: Tensor) -> tuple[Tensor, ...]:
            made = combine.scan(xs, short=min(sizes) < 2 ** len(xs))
            before = [ctx.comm.fetch_rows(x[len(x) - (own is not None) :], 0, axes, held, wanted, why) for x in made]
            shown = combine(*combine.of_many(_one_row(made, before)), *_one_row(made, made))
            rows = made
            if own:
                earlier = [row[-1:].expand_as(x) for row, x in zip(combine.scan(before), made, strict=True)]
                rows = combine(*earlier, *made)
            return tuple([_tied(*of) for of in zip(rows, made, shown, strict=True)])

        return run

    whole = [] if pointwise else [n for dims in names for n in dims[1:]]
    crossing = {"t": t} if t > 1 else {}
    whole += [] if crossing else ["t"]
    inputs: Any = dict(zip(xs, names, strict=True))
    return notation(inputs, *names, whole=whole, local=local, crossing=crossing)
