"""Convolutions and pooling: batch and channels may be split, positions are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import compat
from .core import Arg, Local, LocalFn, Rule, args_in, notation, rule
from .dims import meta_shapes, names, sizes_of

Tensor = torch.Tensor

# ---------------------------------------------------------------------------------------------- convolution


def _conv_rule(
    fn: Callable[..., Tensor],
    nd: int,
    transposed: bool,
    groups_at: int,
    x: Arg,
    weight: Arg,
    bias: Arg | None,
    rest: tuple[Any, ...],
    named: dict[str, Any],
) -> Rule:
    """``x`` (b, i, positions), ``weight`` (o, i, kernel) or, transposed, (i, o, kernel); ``rest``: after the
    bias."""
    groups = rest[groups_at] if len(rest) > groups_at else named.get("groups", 1)
    (shape,) = meta_shapes(fn, x, weight, bias, *rest, **named)
    before, kernel, after = (
        names(p, s) for p, s in zip("xky", (x.shape[-nd:], weight.shape[2:], shape[-nd:]), strict=True)
    )
    b = ["b"] if x.ndim == nd + 2 else []
    i, o = (("g", "i"), ("g", "o")) if groups > 1 else (("i",), ("o",))
    w = [i, ("o",)] if transposed else [o, ("i",)]
    sizes = {"i": x.shape[-nd - 1] // groups, "o": shape[-nd - 1] // groups, "g": groups}

    def local(ctx: Local) -> LocalFn | None:
        first, last = ctx.bounds("g")
        own = (last - first) or 1

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
            if len(rest) > groups_at:
                rest = (*rest[:groups_at], own, *rest[groups_at + 1 :])
            else:
                named = {**named, "groups": own}
            return fn(x, weight, bias, *rest, **named)

        return run if ctx.is_split("g") else None

    return notation(
        {x: [*b, i, *before], weight: [*w, *kernel], bias: [o]}, [*b, o, *after],
        sizes=sizes | sizes_of(after, shape[-nd:]), whole=[*before, *kernel, *after], reduced="i",
        linear=[[x, bias], [weight, bias]], heavy=True, padded=True, local=local,
    )  # fmt: skip


def _register_conv(nd: int) -> None:
    fn, back = getattr(torch, f"conv{nd}d"), getattr(torch, f"conv_transpose{nd}d")

    @rule(f"conv{nd}d")
    def conv(input: Arg, weight: Arg, bias: Arg | None = None, *rest: Any, **named: Any) -> Rule:
        return _conv_rule(fn, nd, False, 3, input, weight, bias, rest, named)

    @rule(f"conv_transpose{nd}d")
    def conv_transpose(input: Arg, weight: Arg, bias: Arg | None = None, *rest: Any, **named: Any) -> Rule:
        return _conv_rule(back, nd, True, 3, input, weight, bias, rest, named)


for _nd in (1, 2, 3):
    _register_conv(_nd)


@rule("convolution")
def convolution(input: Arg, weight: Arg, bias: Arg | None, *rest: Any, **named: Any) -> Rule | None:
    """The op behind all of them: stride, padding, dilation, transposed, output_padding, groups."""
    if len(rest) < 4:
        return None
    nd = weight.ndim - 2
    if input.ndim != nd + 2:
        return None
    return _conv_rule(torch.convolution, nd, bool(rest[3]), 5, input, weight, bias, rest, named)


# ---------------------------------------------------------------------------------------------- pooling


def _pool(name: str, nd: int, *, linear: bool = False) -> None:
    """All dims before the positions are free; another tensor (indices, samples) begins with the same dims."""
    fn = getattr(compat.C_NN, name, None) or getattr(torch, name)

    def make(input: Arg, *args: Any, **named: Any) -> Rule | None:
        lead, before = names("b", input.shape[:-nd]), names("x", input.shape[-nd:])
        entries = {input: [*lead, *before]}
        for k, t in enumerate(args_in((args, named))):
            if t.shape[: len(lead)] != input.shape[:-nd]:
                return None
            entries[t] = [*lead, *names(f"z{k}_", t.shape[len(lead) :])]
        shapes = meta_shapes(fn, input, *args, **named)
        after = names("y", shapes[0][-nd:])
        sizes = sizes_of(after, shapes[0][-nd:])
        whole = [f for letters in (*entries.values(), [*lead, *after]) for f in letters[len(lead) :]]
        groups = [input] if linear else []
        return notation(entries, *[[*lead, *after]] * len(shapes), sizes=sizes, whole=whole, linear=groups, padded=True)

    rule(name)(make)


for _nd in (1, 2, 3):
    _pool(f"max_pool{_nd}d", _nd)
    _pool(f"avg_pool{_nd}d", _nd, linear=True)
    _pool(f"adaptive_avg_pool{_nd}d", _nd, linear=True)
    _pool(f"adaptive_max_pool{_nd}d", _nd)
_pool("max_pool1d_with_indices", 1)
for _nd in (2, 3):
    _pool(f"max_pool{_nd}d_with_indices", _nd)
    _pool(f"fractional_max_pool{_nd}d", _nd)
    _pool(f"max_unpool{_nd}d", _nd)


# ---------------------------------------------------------------------------------------------- patches


@rule("im2col")
def im2col(input: Arg, kernel_size: Sequence[int], *rest: Any, **named: Any) -> Rule:
    """Patches as columns: the channel leads the rows of a patch."""
    (shape,) = meta_shapes(compat.C_NN.im2col, input, kernel_size, *rest, **named)
    sizes = {"k": shape[-2] // max(input.shape[-3], 1), "l": shape[-1]}
    return _patches("... c h w -> ... (c k) l", input, sizes)


@rule("col2im")
def col2im(input: Arg, output_size: Sequence[int], *rest: Any, **named: Any) -> Rule:
    """Columns added up to images."""
    (shape,) = meta_shapes(compat.C_NN.col2im, input, output_size, *rest, **named)
    sizes = {"c": shape[-3], "k": input.shape[-2] // max(shape[-3], 1), "h": shape[-2], "w": shape[-1]}
    return _patches("... (c k) l -> ... c h w", input, sizes)


def _patches(text: str, x: Arg, sizes: dict[str, int]) -> Rule:
    return notation(text, x, sizes=sizes, whole="k l h w", linear=[x], padded=True)
