"""Elementwise ops: known by PyTorch's tag; listed here where it is missing or where they are linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import compat
from .dims import names
from .factor_notation import Arg, Local, LocalFn, Rule, args_in, composite, lines, notation, rule

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
    if not isinstance(packet, compat.OpOverloadPacket):
        return False
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def pointwise_rule(*args: Any, **kwargs: Any) -> Rule | None:
    """All tensors broadcast together; what the op is linear in is not known."""
    return _together((args, kwargs))


def _together(given: Any, *linear: Sequence[Any], outputs: int = 1, **flags: Any) -> Rule | None:
    """Tensors that broadcast together; a group with a number but zero, which all ranks would add, is none.

    With a number that is not finite the op is linear in nothing: where a part of a sum is zero it would make NaN of it.
    """
    tensors = dict.fromkeys(args_in(given), "...")
    numbers = [v for v in given if isinstance(v, (float, complex))] if isinstance(given, tuple) else []
    finite = all(v - v == 0 for v in numbers)
    groups = [g for g in linear if finite and all(isinstance(v, Arg) or v == 0 for v in g)]
    return notation(tensors, *["..."] * outputs, linear=groups, **flags) if tensors else None


lines({
    "frexp": lambda x, **kwargs: _together(x, outputs=2),
    "neg negative deg2rad rad2deg real imag": lambda x, **kwargs: _together(x, [x]),
    "zeros_like empty_like zero": lambda x, **kwargs: _together(x, [x]),  # zeros are a part of any sum
    "add sub subtract rsub": lambda x, other, *args, **kwargs: _together((x, other), [x, other]),
    "mul multiply": lambda x, other, **kwargs: _together((x, other), [x], [other]),
    "div divide true_divide": lambda x, other, *, rounding_mode=None, **kwargs: _together(
        (x, other), [x] if rounding_mode is None and (isinstance(other, Arg) or other != 0) else []
    ),
    "ldexp": lambda x, other, **kwargs: _together((x, other), [x]),
    # With the condition alone the size of the result depends on values.
    "where": lambda condition, x=None, other=None, **kwargs: (
        None if other is None else _together((condition, x, other), [x, other])
    ),
    "masked_fill": lambda x, mask, value: _together((x, mask, value), [x, value]),
    "lerp": lambda x, end, weight, **kwargs: _together((x, end, weight), [x, end]),
    "addcmul": lambda x, a, b, **kwargs: _together((x, a, b), [x, a], [x, b]),
    "addcdiv": lambda x, a, b, **kwargs: _together((x, a, b), [x, a]),
    "complex": lambda real, imag, **kwargs: _together((real, imag), [real, imag]),
    # The value in the shape of x, whose own is lost.
    "copy": lambda x, src, non_blocking=False: _together((x, src), [x, src] if isinstance(src, Arg) else []),
})  # fmt: skip


def _filled(op: Callable[..., Any]) -> Callable[..., Rule | None]:
    """The tensor only lends its shape and its splits: what is pending there need not be reduced."""

    def local(ctx: Local) -> LocalFn | None:
        shape = ctx.out_shape()
        if shape == ctx.in_shape():
            return None
        return lambda x, *args, **kwargs: op(x.new_empty(shape), *args, **kwargs)

    return lambda x, *args, **kwargs: _together(x, lends=[x], local=local)


rule("full_like")(_filled(torch.full_like))
rule("ones_like")(_filled(torch.ones_like))


@rule(
    *("clone", "contiguous", "detach", "alias", "positive", "conj", "_conj", "resolve_conj", "resolve_neg"),
    *("conj_physical", "lift_fresh", "cpu", "cuda", "pin_memory"),
)
def copied(x: Arg, *args: Any, **kwargs: Any) -> Rule | None:
    """The same elements: any Partial passes."""
    return _together(x, [x], moves=not x.dtype.is_complex)


def _cast(x: Arg, dtype: torch.dtype | None) -> Rule | None:
    if dtype is None or dtype == x.dtype:
        return copied(x)
    # Rounding aside, a cast between floating dtypes is linear; to integers and to bool it is not.
    linear = (x.dtype.is_floating_point and (dtype.is_floating_point or dtype.is_complex)) or (
        x.dtype.is_complex and dtype.is_complex
    )
    return _together(x, [x] if linear else [])


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
        return _together(x)  # x.type("torch.FloatTensor"): the old way to say it
    return _cast(x, next((a for a in given if isinstance(a, torch.dtype)), None))


def _lend_dtype(x: Arg, other: Arg) -> Rule:
    linear = [x] if x.dtype.is_floating_point and other.dtype.is_floating_point else []
    return notation(
        {x: x.letters, other: names("o", other.shape)}, x.letters, linear=linear,
        decompose=lambda x, other, *a, **k: x.to(other.dtype, *a, **k),
    )  # fmt: skip


_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32, "long": torch.int64,
    "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool,
}  # fmt: skip
for _name, _dtype in _CASTS.items():
    rule(_name)(lambda x, dtype=_dtype, **kwargs: _cast(x, dtype))


@rule("isin")
def isin(elements: Any, test: Any, **kwargs: Any) -> Rule | None:
    """Each element against all test elements, which must be whole."""
    if not isinstance(elements, Arg):
        return None
    if not isinstance(test, Arg):
        return _together(elements)
    return notation({elements: elements.letters, test: names("t", test.shape)}, elements.letters)
