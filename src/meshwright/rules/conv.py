"""Convolutions and pooling: batch and channels may be split, positions are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .core import Arg, Local, LocalFn, Rule, notation, rule
from .dims import filled, names

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
    meta = [torch.empty(t.shape, dtype=t.dtype, device="meta") if t is not None else None for t in (x, weight, bias)]
    shape = fn(*meta, *rest, **named).shape
    before, kernel, after = (
        names(p, s) for p, s in zip("xky", (x.shape[-nd:], weight.shape[2:], shape[-nd:]), strict=True)
    )
    b = "b " if x.ndim == nd + 2 else ""
    per_group = {"i": x.shape[-nd - 1] // groups, "o": shape[-nd - 1] // groups}
    i, o = ("(g i)", "(g o)") if groups > 1 else ("i", "o")
    w = f"{i} o" if transposed else f"{o} i"
    text = f"{b}{i} {' '.join(before)}, {w} {' '.join(kernel)}, {o} -> {b}{o} {' '.join(after)}"
    whole = " ".join(f for f in (*before, *kernel, *after) if f != "1")
    sizes = {f: n for f, n in zip(after, shape[-nd:], strict=True) if f != "1"} | per_group | {"g": groups}

    def local(ctx: Local) -> LocalFn | None:
        first, last = ctx.bounds("g") if groups > 1 else (0, 1)
        own = (last - first) or 1

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
            if len(rest) > groups_at:
                rest = (*rest[:groups_at], own, *rest[groups_at + 1 :])
            else:
                named = {**named, "groups": own}
            return fn(x, weight, bias, *rest, **named)

        return filled(ctx, run) or (run if ctx.is_split("g") else None)

    return notation(
        text, x, weight, bias, sizes=sizes, whole=whole, reduced="i", linear=[[x, bias], [weight, bias]],
        heavy=True, local=local,
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
    fn = getattr(torch._C._nn, name, None) or getattr(torch, name)

    def make(input: Arg, *args: Any, **named: Any) -> Rule | None:
        others = [a for a in (*args, *named.values()) if isinstance(a, Arg)]
        shapes = _meta_shapes(fn, input, args, named)
        lead = names("b", input.shape[:-nd])
        if any(t.shape[: len(lead)] != input.shape[:-nd] for t in others):
            return None
        entries = [[*lead, *names("x", input.shape[-nd:])]]
        known: dict[str, int] = {}
        for k, t in enumerate(others):
            entries.append([*lead, *names(f"z{k}_", t.shape[len(lead) :])])
        outs = []
        for shape in shapes:
            own = names("y", shape[-nd:])
            known |= {f: n for f, n in zip(own, shape[-nd:], strict=True) if f != "1"}
            outs.append([*lead, *own])
        whole = {f for dims in (*entries, *outs) for f in dims[len(lead) :] if f != "1"}
        text = f"{', '.join(map(' '.join, entries))} -> {', '.join(map(' '.join, outs))}"

        groups = [[input]] if linear else []
        return notation(
            text, input, *others, sizes=known, whole=" ".join(sorted(whole)), linear=groups,
            local=lambda ctx: filled(ctx, fn),
        )  # fmt: skip

    rule(name)(make)


def _meta_shapes(fn: Callable[..., Any], x: Arg, args: tuple[Any, ...], named: dict[str, Any]) -> list[tuple[int, ...]]:
    def meta(a: Any) -> Any:
        return torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Arg) else a

    made = fn(meta(x), *map(meta, args), **{k: meta(v) for k, v in named.items()})
    return [tuple(t.shape) for t in ([made] if isinstance(made, Tensor) else made)]


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
    (shape,) = _meta_shapes(torch._C._nn.im2col, input, (kernel_size, *rest), named)
    b = "b " if input.ndim == 4 else ""
    sizes = {"k": shape[-2] // max(input.shape[-3], 1), "l": shape[-1]}
    return _patches(torch._C._nn.im2col, f"{b}c h w -> {b}(c k) l", input, sizes)


@rule("col2im")
def col2im(input: Arg, output_size: Sequence[int], *rest: Any, **named: Any) -> Rule:
    """Columns added up to images."""
    (shape,) = _meta_shapes(torch._C._nn.col2im, input, (output_size, *rest), named)
    b = "b " if input.ndim == 3 else ""
    sizes = {"c": shape[-3], "k": input.shape[-2] // max(shape[-3], 1), "h": shape[-2], "w": shape[-1]}
    return _patches(torch._C._nn.col2im, f"{b}(c k) l -> {b}c h w", input, sizes)


def _patches(fn: LocalFn, text: str, x: Arg, sizes: dict[str, int]) -> Rule:
    return notation(text, x, sizes=sizes, whole="k l h w", linear=[[x]], local=lambda ctx: filled(ctx, fn))
