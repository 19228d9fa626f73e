"""Elementwise ops: known by PyTorch's tag; listed here where it is missing or where they are linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from .core import Arg, Local, LocalFn, Rule, composite, notation, rule
from .dims import args_in, bool_free, names

# Elementwise ops whose ATen overloads do not say so: aliases, tests, factories by example, casts.
_UNTAGGED = frozenset(
    """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide fix greater greater_equal less
    less_equal multiply negative not_equal subtract floor_divide isclose isreal hardswish log_sigmoid
    logsigmoid softsign tanhshrink __rrshift__ __rlshift__ __and__ __or__ __xor__ square zeros_like
    ones_like full_like empty_like contiguous detach alias to type float double half bfloat16 cfloat
    cdouble chalf long int short char byte bool real imag conj resolve_conj resolve_neg conj_physical
    complex polar fill zero copy _to_copy lift_fresh _conj _neg_view special_expit special_psi
    special_gammaln special_ndtr special_multigammaln special_gammainc special_gammaincc
    """.split()  # noqa: SIM905 - one word after another reads better than a list of strings
)
# Tagged, but not (only) elementwise: reductions with an elementwise overload, a test that gives a bool.
_OTHERWISE = frozenset({"equal", "max", "min", "norm", "native_dropout_backward", "where"})


@lru_cache(maxsize=4096)
def is_pointwise(name: str) -> bool:
    """Whether each element of the result comes from the elements in its place, and from nothing random."""
    if name in _OTHERWISE:
        return False
    if name in _UNTAGGED:
        return True
    if name.startswith("special_") and is_pointwise(name.removeprefix("special_")):
        return True
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def pointwise_rule(*args: Any, **kwargs: Any) -> Rule | None:
    """All tensors broadcast together; what the op is linear in is not known."""
    return _together(list(args_in((args, kwargs))))


def _together(tensors: list[Arg], *linear: Sequence[Arg | None], outputs: int = 1, moves: bool = False) -> Rule | None:
    if not tensors:
        return None
    text = f"{', '.join(['...'] * len(tensors))} -> {', '.join(['...'] * outputs)}"
    return notation(text, *tensors, linear=bool_free(*linear), moves=moves)


def _tensor(*values: Any) -> Sequence[Arg | None]:
    """A linear group; empty (so none) as soon as one of the terms is a number but zero, which all ranks would add."""
    tensors = [v for v in values if isinstance(v, Arg)]
    return tensors if all(isinstance(v, Arg) or v == 0 for v in values) else []


@rule("frexp")
def frexp(x: Arg, **kwargs: Any) -> Rule | None:
    """Mantissa and exponent."""
    return _together([x], outputs=2)


@rule("neg", "negative", "deg2rad", "rad2deg", "zeros_like", "empty_like", "zero", "real", "imag")
def unary_linear(x: Arg, **kwargs: Any) -> Rule | None:
    """Linear in the one tensor (zeros are a part of a sum whatever the rest is)."""
    return _together([x], [x])


def _filled(op: Callable[..., Any]) -> Callable[..., Rule | None]:
    """The tensor only lends its shape and its splits: what is pending there need not be reduced."""

    def filled(x: Arg, *args: Any, **kwargs: Any) -> Rule | None:
        def local(ctx: Local) -> LocalFn | None:
            shape = ctx.out_shape()
            if shape == ctx.in_shape():
                return None
            return lambda x, *args, **kwargs: op(x.new_empty(shape), *args, **kwargs)

        made = _together([x])
        return made and replace(made, lends=frozenset([x.index]), local=local)

    return filled


rule("full_like")(_filled(torch.full_like))
rule("ones_like")(_filled(torch.ones_like))


@rule(
    *("clone", "contiguous", "detach", "alias", "positive", "conj", "_conj", "resolve_conj", "resolve_neg"),
    *("conj_physical", "lift_fresh", "cpu", "cuda", "pin_memory"),
)
def copied(x: Arg, *args: Any, **kwargs: Any) -> Rule | None:
    """The same elements: any Partial passes."""
    return _together([x], [x], moves=not x.dtype.is_complex)


def _cast(x: Arg, dtype: torch.dtype | None, *others: Arg) -> Rule | None:
    if dtype is None or dtype == x.dtype:
        return copied(x)
    # Rounding aside, a cast between floating dtypes is linear; to integers and to bool it is not.
    linear = (x.dtype.is_floating_point and (dtype.is_floating_point or dtype.is_complex)) or (
        x.dtype.is_complex and dtype.is_complex
    )
    return _together([x], [x] if linear else [])


@composite("type_as")
def type_as(x: Any, other: Any) -> Any:
    """Only the dtype of ``other`` matters: it need not be moved."""
    return x.to(other.dtype)


@rule("to", "type", "_to_copy")
def to(x: Arg, *args: Any, **kwargs: Any) -> Rule | None:
    """Casts and moves to a device; another tensor only lends its dtype."""
    given = [*args, *kwargs.values()]
    others = [a for a in given if isinstance(a, Arg)]
    if others:
        return _lend_dtype(x, others[0])
    if any(isinstance(a, (str, type)) and "Tensor" in str(a) for a in given):
        return _together([x])  # x.type("torch.FloatTensor"): the old way to say it
    dtype = next((a for a in given if isinstance(a, torch.dtype)), None)
    return _cast(x, dtype)


def _lend_dtype(x: Arg, other: Arg) -> Rule:
    mine, its = x.letters, names("o", other.shape)
    text = f"{' '.join(mine)}, {' '.join(its)} -> {' '.join(mine)}"
    linear = [[x]] if x.dtype.is_floating_point and other.dtype.is_floating_point else []
    return notation(text, x, other, linear=linear, decompose=lambda x, other, *a, **k: x.to(other.dtype, *a, **k))


_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32, "long": torch.int64,
    "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def _register_casts() -> None:
    for name, dtype in _CASTS.items():
        rule(name)(lambda x, dtype=dtype, **kwargs: _cast(x, dtype))


_register_casts()


@rule("copy")
def copy(x: Arg, src: Any, non_blocking: bool = False) -> Rule | None:
    """``src`` in the shape of ``x``, whose own values are lost."""
    return _together([x, src], [x, src]) if isinstance(src, Arg) else _together([x])


@rule("add", "sub", "subtract", "rsub")
def add(x: Any, other: Any, *args: Any, **kwargs: Any) -> Rule | None:
    """Jointly linear; a number but zero would be added on every rank, so with one a Partial is reduced first."""
    return _together(list(args_in((x, other))), _tensor(x, other))


@rule("mul", "multiply")
def mul(x: Any, other: Any, **kwargs: Any) -> Rule | None:
    """Linear in each factor."""
    return _together(list(args_in((x, other))), _tensor(x), _tensor(other))


@rule("div", "divide", "true_divide")
def div(x: Any, other: Any, *, rounding_mode: str | None = None, **kwargs: Any) -> Rule | None:
    """Linear in the dividend unless the quotient is rounded."""
    return _together(list(args_in((x, other))), _tensor(x) if rounding_mode is None else [])


@rule("ldexp")
def ldexp(x: Any, other: Any, **kwargs: Any) -> Rule | None:
    """x × 2^other."""
    return _together(list(args_in((x, other))), _tensor(x))


@rule("where")
def where(condition: Arg, x: Any = None, other: Any = None, **kwargs: Any) -> Rule | None:
    """Jointly linear in the two branches; with the condition alone the result's size depends on values."""
    if x is None or other is None:
        return None
    return _together(list(args_in((condition, x, other))), _tensor(x, other))


@rule("masked_fill")
def masked_fill(x: Arg, mask: Arg, value: Any) -> Rule | None:
    """Linear in x and the value together."""
    return _together(list(args_in((x, mask, value))), _tensor(x, value))


@rule("lerp")
def lerp(x: Arg, end: Arg, weight: Any, **kwargs: Any) -> Rule | None:
    """x + weight × (end - x)."""
    return _together(list(args_in((x, end, weight))), _tensor(x, end))


@rule("addcmul")
def addcmul(x: Arg, a: Arg, b: Arg, **kwargs: Any) -> Rule | None:
    """x + value × a × b."""
    return _together([x, a, b], _tensor(x, a), _tensor(x, b))


@rule("addcdiv")
def addcdiv(x: Arg, a: Arg, b: Arg, **kwargs: Any) -> Rule | None:
    """x + value × a / b."""
    return _together([x, a, b], _tensor(x, a))


@rule("complex")
def complex_(real: Arg, imag: Arg, **kwargs: Any) -> Rule | None:
    """real + i × imag."""
    return _together([real, imag], _tensor(real, imag))


@rule("isin")
def isin(elements: Any, test: Any, **kwargs: Any) -> Rule | None:
    """Each element against all test elements, which must be whole."""
    given = list(args_in((elements, test)))
    if len(given) == 1:
        return _together(given) if isinstance(elements, Arg) else None
    mine, its = elements.letters, names("t", test.shape)
    return notation(f"{' '.join(mine)}, {' '.join(its)} -> {' '.join(mine)}", elements, test)
