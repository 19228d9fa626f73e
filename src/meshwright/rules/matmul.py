"""Contractions: the contracted factor may be split, the result is then Partial; linear in each operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from .dims import aligned, broadcast_letters, dims_of, names, without
from .factor_notation import Arg, Local, LocalFn, Rule, composite, lines, notation, rule

Tensor = torch.Tensor


@rule("linear")
def linear(x: Arg, weight: Arg, bias: Arg | None = None) -> Rule | None:
    """x Wᵀ + b, with W of shape (n, k) or (k,)."""
    n = ["n"] * (weight.ndim - 1)
    if bias is not None and bias.ndim > 1:
        return None
    b = aligned(n, bias.shape) if bias is not None else []
    inputs = {x: ["...", "k"], weight: [*n, "k"], bias: b}

    def local(ctx: Local) -> LocalFn | None:
        # Of an input that is not contiguous the gradient of the bias is added up in another order, and where parts are
        # uneven (one column is contiguous) only some ranks' is not: replicas of the bias would drift apart.
        ranks = math.prod(ctx.inputs[0].mesh.sizes[a] for a in ctx.axes("k"))
        return _in_order if bias is not None and x.ndim > 2 and x.shape[-1] % ranks else None

    return notation(
        inputs, ["...", *n], reduced="k", linear=[[x, bias], [weight, bias]], heavy=True, local=local,
        blockwise=True,
    )  # fmt: skip


def _in_order(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(input.contiguous(), weight, bias)


@rule("matmul", "linalg_matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul(x: Arg, y: Arg, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Rule | None:
    """Vectors, matrices, and batches that broadcast."""
    if x.ndim == 0 or y.ndim == 0:
        return None
    m, n = ["m"] * (x.ndim > 1), ["n"] * (y.ndim > 1)
    left, right = ["..."] * (x.ndim > 1), ["..."] * (y.ndim > 1)
    lead = ["..."] * (max(x.ndim, y.ndim) > 2)
    return notation(
        {x: [*left, *m, "k"], y: [*right, "k", *n]}, [*lead, *m, *n], reduced="k", linear=[x, y], heavy=True
    )


@rule("inner")
def inner(x: Arg, y: Arg, **kwargs: Any) -> Rule | None:
    """Last dims against each other, all others side by side."""
    if x.ndim == 0 or y.ndim == 0:
        return notation("..., ... -> ...", x, y, linear=[x, y])
    a, b = names("m", x.shape[:-1]), names("n", y.shape[:-1])
    return notation({x: [*a, "k"], y: [*b, "k"]}, [*a, *b], reduced="k", linear=[x, y], heavy=True)


@rule("kron")
def kron(x: Arg, y: Arg) -> Rule:
    """Each dim of the result is one of x, and in each of its indices that dim of y."""
    n = max(x.ndim, y.ndim)
    left, right = (["1"] * (n - t.ndim) + names(f, t.shape) for t, f in ((x, "m"), (y, "n")))
    out = [b if a == "1" else a if b == "1" else (a, b) for a, b in zip(left, right, strict=True)]
    return notation(
        {x: left[n - x.ndim :], y: right[n - y.ndim :]}, out, linear=[x, y], local=lambda ctx: _kron, heavy=True
    )


def _kron(x: Tensor, y: Tensor) -> Tensor:
    """PyTorch's kernel ends with a view, which what it multiplied does not always allow: one row times a column."""
    n = max(Tensor.dim(x), Tensor.dim(y))
    left, right = ([1] * (n - Tensor.dim(t)) + list(Tensor.size(t)) for t in (x, y))
    x = x.reshape([m for a in left for m in (a, 1)])
    y = y.reshape([m for b in right for m in (1, b)])
    return (x * y).reshape([a * b for a, b in zip(left, right, strict=True)])


def _added(term: Arg, x: Arg, y: Arg, left: str, right: str, out: str, reduced: str = "", **flags: Any) -> Rule | None:
    """beta × term + alpha × x @ y, where the term broadcasts to the result."""
    letters = out.split()
    if term.ndim > len(letters):
        return None
    known = dict(zip(left.split(), x.shape, strict=True)) | dict(zip(right.split(), y.shape, strict=True))
    return notation(
        {term: aligned(letters, term.shape), x: left, y: right}, out, reduced=reduced, linear=[[term, x], [term, y]],
        sizes=known, heavy=True, **flags,
    )  # fmt: skip


lines({
    "outer ger": lambda x, y, **kwargs: notation("m, n -> m n", x, y, linear=[x, y], heavy=True),
    "addmm": lambda term, x, y, *args, **kwargs: _added(term, x, y, "m k", "k n", "m n", "k"),
    "addmv": lambda term, x, y, **kwargs: _added(term, x, y, "m k", "k", "m", "k", padded=True),
    "addr": lambda term, x, y, **kwargs: _added(term, x, y, "m", "n", "m n"),
    "baddbmm": lambda term, x, y, *args, **kwargs: _added(term, x, y, "b m k", "b k n", "b m n", "k"),
    "addbmm": lambda term, x, y, **kwargs: _added(term, x, y, "b m k", "b k n", "m n", "b k"),
    # xᵀ W y + b, with W of shape (o, i, j).
    "bilinear": lambda x, y, weight, bias=None: notation(
        "... i, ... j, o i j, o -> ... o", x, y, weight, bias, reduced="i j",
        linear=[[x, bias], [y, bias], [weight, bias]], heavy=True, padded=True,
    ),
})  # fmt: skip


@rule("linalg_solve_triangular")
def solve_triangular(a: Arg, b: Arg, *, left: bool = True, **kwargs: Any) -> Rule | None:
    """Systems of a batch are free, and so is what each is solved for."""
    if min(a.ndim, b.ndim) < 2:
        return None
    known = "... n k" if left else "... k n"
    return notation(f"... n m, {known} -> {known}", a, b, whole="n m", linear=[b], heavy=True)


@rule("linalg_vecdot")
def vecdot(x: Arg, y: Arg, *, dim: int = -1, **kwargs: Any) -> Rule | None:
    """Dot products along one dim, the others broadcast."""
    (a, b), out, whole = broadcast_letters(x.shape, y.shape)
    (d,) = dims_of(len(whole), dim)
    return notation({x: a, y: b}, without(out, (d,)), reduced=[out[d]], linear=[x, y], heavy=True)


@rule("linalg_cross")
def linalg_cross(x: Arg, y: Arg, *, dim: int = -1, **kwargs: Any) -> Rule | None:
    """The dim of the three components stays whole."""
    (a, b), out, _ = broadcast_letters(x.shape, y.shape)
    return notation({x: a, y: b}, out, whole=[out[dim]], linear=[x, y])


@composite("cross")
def cross(x: Any, y: Any, dim: int | None = None, **kwargs: Any) -> Any:
    """Without a dim, the first of global size 3 (a shard may have another dim of that size)."""
    if dim is None:
        shape = torch.broadcast_shapes(x.shape, y.shape)
        dim = next((i for i, n in enumerate(shape) if n == 3), -1)
    return torch.linalg.cross(x, y, dim=dim)


@rule("tensordot")
def tensordot(x: Arg, y: Arg, dims: Any = 2, dims_other: Any = None, out: Any = None) -> Rule | None:
    """Contraction of the given dims of x with those of y; ATen has the dims of each as an argument of its own."""
    if isinstance(dims, Arg):
        return None
    if dims_other is not None:
        dims = (dims, dims_other)
    if isinstance(dims, int):
        dims = (range(x.ndim - dims, x.ndim), range(dims))
    elif len(dims) != 2:
        return None
    listed = [list(d) if isinstance(d, (list, tuple, range)) else [d] for d in dims]
    over_x, over_y = [d % max(x.ndim, 1) for d in listed[0]], [d % max(y.ndim, 1) for d in listed[1]]
    a, b = names("m", x.shape), names("n", y.shape)
    reduced = []
    for i, j in zip(over_x, over_y, strict=True):
        if a[i] != "1" and b[j] != "1":
            b[j] = a[i]
        reduced += [a[i], b[j]]
    return notation({x: a, y: b}, without(a, over_x) + without(b, over_y), reduced=reduced, linear=[x, y], heavy=True)


# ------------------------------------------------------------------------------------------------ einsum


def _terms(equation: str) -> tuple[list[list[str]], list[str] | None]:
    """Subscripts of each operand and of the result (None: not said), with ``...`` as one entry."""
    left, arrow, right = equation.replace(" ", "").partition("->")

    def split(term: str) -> list[str]:
        return list(term.replace("...", ".")) if term else []

    return [split(t) for t in left.split(",")], split(right) if arrow else None


def _einsum_letters(terms: list[list[str]], operands: Sequence[Arg]) -> list[list[str]] | None:
    """A letter per dim of each operand; the dims of ``...`` are numbered from the right."""
    made = []
    for term, t in zip(terms, operands, strict=True):
        hidden = t.ndim - (len(term) - term.count("."))
        if hidden < 0 or (hidden and "." not in term):
            return None
        dots = [f"e{hidden - 1 - i}" for i in range(hidden)]
        made.append([f for c in term for f in (dots if c == "." else [c])])
    return made


@rule("einsum")
def einsum(equation: Any, *operands: Any) -> Rule | None:
    """Any equation; letters that one operand repeats stay whole."""
    if not isinstance(equation, str):
        return None
    given: Sequence[Arg] = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms, result = _terms(equation)
    if len(terms) != len(given):
        return None
    letters = _einsum_letters(terms, given)
    if letters is None:
        return None
    dots = sorted({f for fs in letters for f in fs if len(f) > 1}, key=lambda f: -int(f[1:]))
    counts = [f for fs in letters for f in fs]
    if result is None:
        out = dots + sorted({f for term in terms for f in term if f != "." and counts.count(f) == 1})
    else:
        out = [f for c in result for f in (dots if c == "." else [c])]
    sizes: dict[str, int] = {}
    for fs, t in zip(letters, given, strict=True):
        for f, n in zip(fs, t.shape, strict=True):
            sizes[f] = n if sizes.get(f, 1) == 1 else sizes[f]
    shown = [
        ["1" if n == 1 else f for f, n in zip(fs, t.shape, strict=True)] for fs, t in zip(letters, given, strict=True)
    ]
    repeated = {f for fs in shown for f in fs if f != "1" and fs.count(f) > 1}
    summed = {f for fs in shown for f in fs if f not in out and f != "1"} - repeated
    return notation(
        dict(zip(given, shown, strict=True)), ["1" if sizes[f] == 1 else f for f in out],
        whole=repeated, reduced=summed, linear=given, heavy=len(given) > 1,
    )  # fmt: skip


@composite("linalg_multi_dot", "chain_matmul")
def multi_dot(*matrices: Any, out: Any = None) -> Any:
    """The product of a chain, in the order that needs the fewest multiplications."""
    chain = list(matrices[0]) if len(matrices) == 1 and isinstance(matrices[0], (list, tuple)) else list(matrices)
    while len(chain) > 2:
        # The widest inner dim first: a good order, found without the full search.
        i = max(range(1, len(chain)), key=lambda i: chain[i].shape[0])
        chain[i - 1 : i + 1] = [torch.matmul(chain[i - 1], chain[i])]
    return reduce(torch.matmul, chain)
