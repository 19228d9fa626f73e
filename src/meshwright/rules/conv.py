"""Convolutions and pooling: batch and channels may be split, positions only of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import compat
from .crossing import Along, brought, in_reach, own_rows
from .dims import meta_shapes, names, sizes_of
from .factor_notation import Arg, Local, LocalFn, Rule, args_in, notation, rule

Tensor = torch.Tensor

# ---------------------------------------------------------------------------------------------- convolution


@dataclass(frozen=True)
class _Options:
    """Options behind the bias, given by their place or by name; ``places`` of those that count here."""

    places: Mapping[str, int]
    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def get(self, name: str, otherwise: Any) -> Any:
        at = self.places[name]
        return self.rest[at] if len(self.rest) > at else self.named.get(name, otherwise)

    def each(self, name: str, otherwise: int, nd: int) -> Sequence[int]:
        """One number for each dim of the positions."""
        value = self.get(name, otherwise)
        listed = list(value) if isinstance(value, (tuple, list)) else [value]
        return listed * nd if len(listed) == 1 else listed

    def having(self, name: str, value: Any) -> _Options:
        at = self.places[name]
        if len(self.rest) > at:
            return replace(self, rest=(*self.rest[:at], value, *self.rest[at + 1 :]))
        return replace(self, named={**self.named, name: value})


_STRAIGHT = {"stride": 0, "padding": 1, "dilation": 2}
_PLAIN, _ANY, _BACK = _STRAIGHT | {"groups": 3}, _STRAIGHT | {"groups": 5}, {"groups": 3}


def _conv_rule(
    fn: Callable[..., Tensor], nd: int, transposed: bool, options: _Options, x: Arg, weight: Arg, bias: Arg | None
) -> Rule:
    """``x`` (b, i, positions), ``weight`` (o, i, kernel) or, transposed, (i, o, kernel)."""
    groups = options.get("groups", 1)
    (shape,) = meta_shapes(fn, x, weight, bias, *options.rest, **options.named)
    before, kernel, after = (
        names(p, s) for p, s in zip("xky", (x.shape[-nd:], weight.shape[2:], shape[-nd:]), strict=True)
    )
    b = ["b"] if x.ndim == nd + 2 else []
    i, o = (("g", "i"), ("g", "o")) if groups > 1 else (("i",), ("o",))
    w = [i, ("o",)] if transposed else [o, ("i",)]
    sizes = {"i": x.shape[-nd - 1] // groups, "o": shape[-nd - 1] // groups, "g": groups}
    sizes |= sizes_of(after, shape[-nd:])
    ways = {} if transposed else _along_positions(options, nd, x, weight, shape)
    crossing = {before[k]: way.size for k, way in enumerate(ways.values()) if min(x.shape[k - nd], way.size) > 1}
    after = [f if f in crossing else g for f, g in zip(before, after, strict=True)]

    def local(ctx: Local) -> LocalFn | None:
        first, last = ctx.bounds("g")
        own = (last - first) or 1
        spans = {f: own_rows(ctx, f) for f in crossing if ctx.is_split(f)}

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
            given = replace(options, rest=rest, named=named)
            if ctx.is_split("g"):
                given = given.having("groups", own)
            for f, (d, way) in zip(before, ways.items() if spans else (), strict=False):
                # What is padded and what other parts have is put around the positions of this one.
                x = way.part(brought(ctx, x, d, f, way.needs, _HALO), *spans[f]) if f in spans else way.whole(x)
            if spans:
                given = given.having("padding", [0] * nd)
            made = fn(x, weight, bias, *given.rest, **given.named)
            for f, (start, stop) in spans.items():
                made = made.narrow(before.index(f) - nd, 0, stop - start)
            return made

        return run if spans or ctx.is_split("g") else None

    return notation(
        {x: [*b, i, *before], weight: [*w, *kernel], bias: [o]}, [*b, o, *after], sizes=sizes,
        whole={*before, *kernel, *after} - set(crossing), reduced="i", linear=[[x, bias], [weight, bias]], heavy=True,
        padded=True, local=local, crossing=crossing,
    )  # fmt: skip


_HALO = "a convolution needs the positions beside a part"


def _along_positions(options: _Options, nd: int, x: Arg, weight: Arg, shape: Sequence[int]) -> dict[int, Along]:
    """What a convolution needs along each dim of the positions, by that dim counted from the end."""
    strides, dilations = options.each("stride", 1, nd), options.each("dilation", 1, nd)
    padding = options.get("padding", 0)
    found = {}
    for k, (stride, dilation) in enumerate(zip(strides, dilations, strict=True)):
        d, reach = k - nd, dilation * (weight.shape[k - nd] - 1)
        if padding == "same":
            ends = reach // 2, reach - reach // 2
        else:
            ends = (0 if padding == "valid" else options.each("padding", 0, nd)[k],) * 2
        found[d] = in_reach(d, x.shape[d], shape[d], reach + 1, stride, ends)
    return found


def _register_conv(nd: int) -> None:
    fn, back = getattr(torch, f"conv{nd}d"), getattr(torch, f"conv_transpose{nd}d")

    @rule(f"conv{nd}d")
    def conv(input: Arg, weight: Arg, bias: Arg | None = None, *rest: Any, **named: Any) -> Rule:
        return _conv_rule(fn, nd, False, _Options(_PLAIN, rest, named), input, weight, bias)

    @rule(f"conv_transpose{nd}d")
    def conv_transpose(input: Arg, weight: Arg, bias: Arg | None = None, *rest: Any, **named: Any) -> Rule:
        return _conv_rule(back, nd, True, _Options(_BACK, rest, named), input, weight, bias)


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
    return _conv_rule(torch.convolution, nd, bool(rest[3]), _Options(_ANY, rest, named), input, weight, bias)


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
