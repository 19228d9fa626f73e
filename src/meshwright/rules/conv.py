"""Convolutions and pooling: positions may be split too, and what windows reach of other parts is brought."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


class _Window(NamedTuple):
    """How windows lie along one dim of ``size`` positions: the i-th begins at ``i * step - pad``."""

    size: int
    many: int
    length: int
    step: int
    pad: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """From the first position of a window to behind its last."""
        return self.dilation * (self.length - 1) + 1

    def along(self, d: int, value: Any) -> Along:
        """The positions of windows along dim ``d``, with a value around them as far as windows reach."""
        over = (self.many - 1) * self.step + self.span - self.size - self.pad
        return in_reach(d, self.size, self.many, self.span, self.step, (self.pad, max(over, self.pad)), value)

    def scale(self, first: int, last: int, inside: bool, like: Tensor) -> Tensor | None:
        """The length of windows ``first:last``, in parts of what they are divided by; None where that is the same.

        ``inside``: by what lies inside; else by what is padded, too.
        """
        limit = self.size if inside else self.size + self.pad
        if not (inside and self.pad) and (self.many - 1) * self.step - self.pad + self.length <= limit:
            return None
        begin = torch.arange(first, last, device=like.device) * self.step - self.pad
        end = (begin + self.length).clamp(max=limit)
        return self.length / (end - (begin.clamp(min=0) if inside else begin)).to(like.dtype)


_POOLS = {"kernel_size": 0, "stride": 1, "padding": 2}
_AVERAGE = _POOLS | {"ceil_mode": 3, "count_include_pad": 4, "divisor_override": 5}
_LARGEST = _POOLS | {"dilation": 3, "ceil_mode": 4}
_REACH = "windows reach over the borders of parts"


def _windows(options: _Options, positions: Sequence[int], shape: Sequence[int]) -> list[_Window]:
    nd = len(shape)
    lengths, pads = options.each("kernel_size", 1, nd), options.each("padding", 0, nd)
    steps = options.each("stride", 0, nd) if options.get("stride", None) not in (None, (), []) else lengths
    wide = options.each("dilation", 1, nd) if "dilation" in options.places else [1] * nd
    return [_Window(*said) for said in zip(positions, shape, lengths, steps, pads, wide, strict=True)]


def _adaptive(positions: Sequence[int], shape: Sequence[int]) -> list[_Window]:
    """Windows side by side; none where they are not of one length."""
    if any(not count or n % count for n, count in zip(positions, shape, strict=True)):
        return []
    return [_Window(n, count, n // count, n // count) for n, count in zip(positions, shape, strict=True)]


def _pool(name: str, nd: int, adaptive: bool = False) -> None:
    """All dims before the positions are free; along these windows reach into other parts."""
    largest = "max" in name
    fn = getattr(compat.C_NN, name, None) or getattr(torch, name)
    pool = f"max_pool{nd}d_with_indices" if largest else f"avg_pool{nd}d"
    pool = getattr(compat.C_NN, pool, None) or getattr(torch, pool)

    def make(input: Arg, *args: Any, **named: Any) -> Rule:
        options = _Options({} if adaptive else _LARGEST if largest else _AVERAGE, args, named)
        shapes = meta_shapes(fn, input, *args, **named)
        positions, shape = input.shape[-nd:], shapes[0][-nd:]
        windows = _adaptive(positions, shape) if adaptive else _windows(options, positions, shape)
        value = 0 if not largest else -math.inf if input.dtype.is_floating_point else torch.iinfo(input.dtype).min
        ways = [w.along(k - nd, value) for k, w in enumerate(windows)] if 0 not in (*positions, *shape) else []
        lead, before, after = names("b", input.shape[:-nd]), names("x", positions), names("y", shape)
        crossing = {f: way.size for f, n, way in zip(before, positions, ways, strict=False) if min(n, way.size) > 1}
        after = [f if f in crossing else g for f, g in zip(before, after, strict=True)]
        divisor = None if adaptive or largest else options.get("divisor_override", None)
        inside = not (adaptive or largest or options.get("count_include_pad", True))

        def local(ctx: Local) -> LocalFn | None:
            spans = {f: own_rows(ctx, f) for f in crossing if ctx.is_split(f)}
            rows = [spans.get(f, (0, n)) for f, n in zip(before, shape, strict=True)]

            def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                for d, (f, way, (start, stop)) in enumerate(zip(before, ways, rows, strict=True), -nd):
                    x = way.part(brought(ctx, x, d, f, way.needs, _REACH), start, stop) if f in spans else way.whole(x)
                if not largest:
                    return _average(pool, windows, rows, divisor, inside, x)
                made = _largest(pool, windows, rows, x)
                return made if len(shapes) > 1 else made[0]

            return run if spans else None

        mean = adaptive and not largest and set(shape) == {1}
        return notation(
            {input: [*lead, *before]}, *[[*lead, *after]] * len(shapes),
            sizes=sizes_of(after, shape) | sizes_of(before, positions), whole={*before, *after} - set(crossing),
            linear=[] if largest else [input], padded=True, local=local, crossing=crossing,
            decompose=_mean_of[nd] if mean else None,
        )  # fmt: skip

    rule(name)(make)


_mean_of = {nd: lambda x, *size, nd=nd, **named: torch.mean(x, tuple(range(-nd, 0)), True) for nd in (1, 2, 3)}


def _cut(x: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    """Of a rank that has no windows, none."""
    for d, (start, stop) in enumerate(rows, -len(rows)):
        x = x.narrow(d, 0, stop - start)
    return x


def _average(
    pool: Callable[..., Tensor], windows: Sequence[_Window], rows: Sequence[tuple[int, int]], divisor: int | None,
    inside: bool, x: Tensor,
) -> Tensor:  # fmt: skip
    """Means of windows of what is padded already, divided by what one device divides by."""
    lengths = [w.length for w in windows]
    made = _cut(pool(x, lengths, [w.step for w in windows]), rows)
    if divisor is not None:
        return made * (math.prod(lengths) / divisor)
    for k, (w, (start, stop)) in enumerate(zip(windows, rows, strict=True), 1):
        scale = w.scale(start, stop, inside, made)
        if scale is not None:
            made = made * scale.view(-1, *[1] * (len(windows) - k))
    return made


def _largest(
    indexed: Callable[..., Any], windows: Sequence[_Window], rows: Sequence[tuple[int, int]], x: Tensor
) -> tuple[Tensor, Tensor]:
    """The largest number of each window of what is padded already, and where it is in the whole."""
    lengths, steps, wide = ([getattr(w, name) for w in windows] for name in ("length", "step", "dilation"))
    with torch.no_grad():
        found = _cut(indexed(x.detach(), lengths, steps, 0, wide)[1], rows)
        here, index, behind = torch.zeros_like(found), torch.zeros_like(found), math.prod(x.shape[-len(rows) :])
        for w, (start, stop), n in zip(windows, rows, x.shape[-len(rows) :], strict=True):
            behind //= n
            first = start * w.step - w.pad if start < stop else 0
            at = found // behind % n + first
            at = torch.where(at < 0, at % w.dilation, at)  # where all is minus infinity, the first that is inside
            here, index = here * n + (at - first), index * w.size + at
    # Not by the kernel's own gradient, which would go to what is padded there.
    return x.flatten(-len(rows)).gather(-1, here.flatten(-len(rows))).view(here.shape), index


def _whole_pool(name: str, nd: int) -> None:
    """Positions stay whole; another tensor (indices, samples) begins with the same dims."""
    fn = getattr(compat.C_NN, name)

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
        return notation(entries, *[[*lead, *after]] * len(shapes), sizes=sizes, whole=whole, padded=True)

    rule(name)(make)


for _nd in (1, 2, 3):
    _pool(f"max_pool{_nd}d", _nd)
    _pool(f"max_pool{_nd}d_with_indices", _nd)
    _pool(f"avg_pool{_nd}d", _nd)
    _pool(f"adaptive_avg_pool{_nd}d", _nd, adaptive=True)
    _pool(f"adaptive_max_pool{_nd}d", _nd, adaptive=True)
for _nd in (2, 3):
    _whole_pool(f"fractional_max_pool{_nd}d", _nd)
    _whole_pool(f"max_unpool{_nd}d", _nd)


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
