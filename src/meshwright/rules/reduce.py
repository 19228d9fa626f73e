"""Reductions: partial results where a reduced dim is split, or a composition with one device's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import crossing
from .dims import dims_of, meta_shapes, names, nothing, put, without
from .factor_notation import Arg, Local, LocalFn, Rule, composite, lines, notation, rule
from .reduce_parts import carrier, extremum, first_index, partial_prod, reduction, whole_prod

Tensor = torch.Tensor

# -------------------------------------------------------------------------------------- sums, logic, products


@rule("mean")
def mean(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Sum of the part over the global count: shards may be uneven, so never a mean of means."""
    dims = dims_of(x.ndim, dim)
    count = math.prod(x.shape[d] for d in dims)

    def run(t: Tensor, *args: Any, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        dtype = dtype or t.dtype
        # A half precision sum may overflow where the mean does not.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = t.sum(dims, keepdim=keepdim, dtype=wide)
        return (total / count if count else total * math.nan).to(dtype)

    def local(ctx: Local) -> LocalFn | None:
        return run if ctx.is_split(*(x.letters[d] for d in dims)) else None

    return reduction(x, dim, keepdim, op="sum", linear=[x], local=local)


@composite("nanmean")
def nanmean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    """Sum and count of what is not NaN."""
    dims = list(range(x.ndim)) if dim is None else dim
    count = torch.sum(~torch.isnan(x), dims, keepdim)
    return torch.nansum(x, dims, keepdim, dtype=dtype) / count


def _tracks(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _prod_composed(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    # Each factor's gradient is the product of all the others: it needs them all on one rank.
    return (whole_prod if _tracks(x) else partial_prod)(x, dim, keepdim, dtype)


def _logical(op: str, of_bytes: str) -> Callable[..., Rule]:
    """uint8 stays uint8, and its 0 and 1 go by the maximum or the minimum."""
    return lambda x, dim=None, keepdim=False, **kwargs: reduction(
        x, dim, keepdim, op=of_bytes if x.dtype == torch.uint8 else op
    )


lines({
    "sum": lambda x, dim=None, keepdim=False, **kwargs: reduction(x, dim, keepdim, op="sum", linear=[x]),
    # Not linear: a NaN may come about only when parts are added.
    "nansum": lambda x, dim=None, keepdim=False, **kwargs: reduction(x, dim, keepdim, op="sum"),
    "count_nonzero": lambda x, dim=None, *more: reduction(x, (dim, *more) if more else dim, op="sum"),
    "trace": lambda x: notation("i j ->", x, linear=[x]),
    "any": _logical("any", "max"),
    "all": _logical("all", "min"),
    "prod": lambda x, dim=None, keepdim=False, **kwargs: reduction(x, dim, keepdim, decompose=_prod_composed),
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ extrema


def _extreme(x: Any, dim: Any, keepdim: bool, largest: bool) -> Any:
    """Largest or smallest value over split dims; all that tie, on all ranks, share the gradient evenly."""
    dims = dims_of(x.ndim, dim)
    best = _best(x, dims, largest)
    if _tracks(x):
        ties = x.detach() == best
        share = ties.to(x.dtype) / torch.sum(ties, dims, keepdim=True)
        best = best + torch.sum(carrier(x) * share.to(x.dtype), dims, keepdim=True)
    return best if keepdim else best.squeeze(dims)


def _best(x: Any, dims: tuple[int, ...], largest: bool) -> Any:
    with torch.no_grad():
        return extremum(x.detach(), dims, largest)


def _selected(x: Any, dim: int, keepdim: bool, largest: bool) -> tuple[Any, Any]:
    """Value and position of the first extremum along one split dim; that element alone has the gradient."""
    (d,) = dims_of(x.ndim, dim)
    best = _best(x, (d,), largest)
    with torch.no_grad():
        index = first_index(x.detach(), best, (d,))
    # What the backward keeps must not be x: that one may be written to, as on one device, where indices alone are kept.
    values = best + torch.gather(carrier(x), d, index) if _tracks(x) else best
    return (values, index) if keepdim else (values.squeeze(d), index.squeeze(d))


def _position(x: Any, dim: int | None, keepdim: bool, largest: bool) -> Any:
    dims = dims_of(x.ndim, dim)
    with torch.no_grad():
        index = first_index(x.detach(), _best(x, dims, largest), dims)
    return index if keepdim else index.squeeze(dims)


def _register_extrema(word: str, largest: bool) -> None:
    result = getattr(torch.return_types, word)

    def values(x: Any, dim: Any = (), keepdim: bool = False, **kwargs: Any) -> Any:
        return _extreme(x, dim, keepdim, largest)

    def either(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        return values(x) if dim is None else result(_selected(x, dim, keepdim, largest))

    def position(x: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Any:
        return _position(x, dim, keepdim, largest)

    @rule(word)
    def word_rule(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
        if isinstance(dim, Arg):
            return notation("..., ... -> ...", x, dim)
        return reduction(x, dim, keepdim, outputs=1 if dim is None else 2, decompose=either)

    lines({
        f"a{word}": lambda x, dim=(), keepdim=False, **kwargs: reduction(x, dim, keepdim, decompose=values),
        f"arg{word}": lambda x, dim=None, keepdim=False, **kwargs: reduction(x, dim, keepdim, decompose=position),
    })  # fmt: skip


_register_extrema("max", True)
_register_extrema("min", False)


def _aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    pair = _extreme(x, dim, keepdim, False), _extreme(x, dim, keepdim, True)
    return torch.return_types.aminmax(pair)


# ------------------------------------------------------------------------------------------------ moments


def _moment_args(
    dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: bool | None = None, **kwargs: Any
) -> tuple[Any, bool, Any]:
    """(dim, keepdim, correction) from all the ways to call var: ``var(x, True)``, ``var(x, 0, False)``..."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if isinstance(correction, bool):
        unbiased = correction
    if unbiased is not None:
        correction = int(unbiased)
    return dim, keepdim, 1 if correction is None else correction


def _var(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Variance and mean, from the differences to the global mean."""
    dim, keepdim, correction = _moment_args(*args, **kwargs)
    dims = dims_of(x.ndim, dim)
    count = math.prod(x.shape[d] for d in dims)
    center = torch.mean(x, dims, keepdim=True)
    off = x - center
    square = off * off if not off.is_complex() else (off * off.conj()).real
    rest = max(count - correction, 0)
    variance = torch.sum(square, dims, keepdim=keepdim)
    if not rest:  # abs() is not linear: the sum over ranks comes first, of which a part may be zero
        variance = variance.abs()
    variance = variance / rest if rest else variance / torch.zeros((), dtype=variance.dtype)
    return variance, center if keepdim else center.squeeze(dims)


def _root(square: Any) -> Any:
    """Square root whose gradient at zero is zero, as PyTorch has it for std and norm."""
    zero = square == 0
    return torch.sqrt(square.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def _std_mean(x: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    variance, center = _var(x, args, kwargs)
    return _root(variance), center


def _moment(composed: Callable[..., Any], outputs: int = 1) -> Callable[..., Rule]:
    return lambda x, *args, **kwargs: reduction(
        x, *_moment_args(*args, **kwargs)[:2], outputs=outputs, decompose=composed
    )


lines({
    "aminmax": lambda x, *, dim=None, keepdim=False: reduction(x, dim, keepdim, outputs=2, decompose=_aminmax),
    "var": _moment(lambda x, *args, **kwargs: _var(x, args, kwargs)[0]),
    "std": _moment(lambda x, *args, **kwargs: _std_mean(x, *args, **kwargs)[0]),
    "var_mean": _moment(lambda x, *args, **kwargs: _var(x, args, kwargs), outputs=2),
    "std_mean": _moment(_std_mean, outputs=2),
})  # fmt: skip


# ------------------------------------------------------------------------------------------------ norms


def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """Norm over split dims; at zero its gradient is zero, as on one device."""
    dims = dims_of(x.ndim, dim)
    x = x if dtype is None else x.to(dtype)
    given = x.dtype
    if given in (torch.float16, torch.bfloat16):
        x = x.float()  # one device accumulates in float32 too
    return _norm_of(x, float(ord), dims, keepdim).to(given.to_real() if given.is_complex else given)


def _norm_of(x: Any, p: float, dims: tuple[int, ...], keepdim: bool) -> Any:
    size = torch.abs(x)
    if p in (math.inf, -math.inf):
        return _extreme(size, dims, keepdim, p > 0)
    if p == 0:
        # The count has no slope; 0 × carrier keeps it attached to x, as on one device.
        return torch.sum((size != 0).to(size.dtype) + 0 * carrier(size), dims, keepdim=keepdim)
    if p == 1:
        return torch.sum(size, dims, keepdim=keepdim)
    if p == 2:
        return _root(torch.sum(size * size, dims, keepdim=keepdim))
    zero = size == 0
    powers = torch.pow(size.masked_fill(zero, 1.0), p).masked_fill(zero, 0.0 if p > 0 else math.inf)
    total = torch.sum(powers, dims, keepdim=keepdim)
    none = total == 0
    return torch.pow(total.masked_fill(none, 1.0), 1 / p).masked_fill(none, 0.0)


@composite("frobenius_norm")
def frobenius_norm(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """The 2-norm over the dims given (none: all)."""
    return torch.linalg.vector_norm(x, 2, dim or None, keepdim, **kwargs)


@composite("norm")
def norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> Any:
    """``Tensor.norm`` as the vector norm that it computes."""
    dtype = next((d for d in (out, dtype) if isinstance(d, torch.dtype)), None)  # Tensor.norm has no out
    kwargs = {} if dtype is None else {"dtype": dtype}
    if p == "nuc":
        return torch.linalg.norm(x, p, dim, keepdim, **kwargs)
    return torch.linalg.vector_norm(x, 2 if p in (None, "fro") else p, dim, keepdim, **kwargs)


def _linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    return torch.linalg.vector_norm(x, 2 if ord in (None, "fro") else ord, dim, keepdim, **kwargs)


@rule("linalg_norm")
def linalg_norm(x: Arg, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule | None:
    """Vector norms and the Frobenius norm; other matrix norms are gathered."""
    pair = x.ndim == 2 if dim is None else len(dims_of(x.ndim, dim)) == 2
    if ord not in (None, "fro") and (pair or isinstance(ord, str)):
        return None
    return reduction(x, dim, keepdim, decompose=_linalg_norm)


@composite("dist")
def dist(x: Any, other: Any, p: float = 2) -> Any:
    """Norm of the difference."""
    return torch.linalg.vector_norm(x - other, p)


def _logsumexp_composed(x: Any, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = dims_of(x.ndim, dim)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    if any(x.shape[d] == 0 for d in dims):  # of nothing there is no maximum
        return torch.log(torch.sum(torch.exp(x), dims, keepdim=keepdim))
    top = _best(x, dims, True)
    top = top.masked_fill(torch.isinf(top), 0.0)
    made = torch.log(torch.sum(torch.exp(x - top), dims, keepdim=True)) + top
    return made if keepdim else made.squeeze(dims)


# ----------------------------------------------------------------------------------------- along whole dims


def _along(x: Arg, dim: Any, outputs: int = 1, **flags: Any) -> Rule:
    letters = x.letters
    return notation({x: letters}, *[letters] * outputs, whole=letters[x.dim(dim) :][:1], **flags)


def _sorted(x: Arg, dim: Any, kwargs: dict[str, Any], outputs: int) -> Rule:
    return _along(x, kwargs.get("dim", -1) if isinstance(dim, bool) else dim, outputs)


lines({
    # The sum of absolute values is a sum.
    "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False, **kwargs: reduction(
        x, dim, keepdim, op="sum" if ord == 1 else None, decompose=_vector_norm
    ),
    # The global maximum (a constant), then the log of the sum.
    "logsumexp special_logsumexp": lambda x, dim, keepdim=False, **kwargs: (
        None if x.dtype.is_complex else reduction(x, dim, keepdim, decompose=_logsumexp_composed)
    ),
    "cumsum": lambda x, dim, **kwargs: crossing.scan(x, dim, crossing.sum_of, torch.add, torch.cumsum, linear=[x]),
    "logcumsumexp": lambda x, dim, **kwargs: (
        _along(x, dim, padded=True) if x.dtype.is_complex
        else crossing.scan(
            x, dim, _logsumexp_of, _logaddexp, _logcumsumexp, lambda ctx: _logcumsumexp if ctx.is_empty() else None
        )
    ),
    # The derivative of an empty part is that part, which has another graph than a derivative.
    "cummax cummin": lambda x, dim, **kwargs: _along(x, dim, outputs=2, padded=True),
    "sort": lambda x, dim=-1, *args, **kwargs: _sorted(x, dim, kwargs, 2),
    "argsort": lambda x, dim=-1, *args, **kwargs: _sorted(x, dim, kwargs, 1),
    "msort": lambda x: _along(x, 0),
    "kthvalue": lambda x, k, dim=-1, keepdim=False: reduction(x, (dim,), keepdim, outputs=2),
    "mode": lambda x, dim=-1, keepdim=False: reduction(x, (dim,), keepdim, outputs=2),
    # Of everything, or values and indices.
    "median nanmedian": lambda x, dim=None, keepdim=False: reduction(x, dim, keepdim, outputs=2 - (dim is None)),
})  # fmt: skip


def _logcumsumexp(x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """PyTorch's gradient of an empty part is what it was given; here it has to be of the part, too, as elsewhere."""
    return torch.logcumsumexp(x, dim, **kwargs) if x.numel() else torch.exp(x)


def _logsumexp_of(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.logsumexp(x, dim, True)


def _logaddexp(x: Tensor, before: Tensor) -> Tensor:
    """Where both are minus infinity the derivatives are zeros, as those of the op are."""
    hidden = (x == -math.inf) & (before == -math.inf)
    made = torch.logaddexp(x.masked_fill(hidden, 0.0), before.masked_fill(hidden, 0.0))
    return made.masked_fill(hidden, -math.inf)


def _product_of(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.prod(x, dim, True, dtype=dtype)


def _cumprod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    made = torch.cumprod(x, *args, **kwargs)
    # Of one element, as along a dim of one, PyTorch's derivative is a constant.  Whole numbers have none.
    return made + nothing((), x.exp()) if x.numel() <= 1 and x.requires_grad else made


@rule("cumprod")
def cumprod(x: Arg, dim: int, **kwargs: Any) -> Rule:
    """A part's scan is multiplied with the products of those before it; derivatives are those of products."""

    def unsplit(ctx: Local) -> LocalFn | None:
        if math.prod(ctx.in_shape()) > 1 or math.prod(x.shape) <= 1 or x.shape[dim] == 1:
            return None
        return _cumprod

    return crossing.scan(x, dim, _product_of, torch.mul, _cumprod, unsplit)


@rule("renorm")
def renorm(x: Arg, p: Any, dim: int, maxnorm: Any) -> Rule:
    """Each slice along ``dim`` by its own norm: every other dim stays whole."""
    return notation({x: x.letters}, x.letters, whole=without(x.letters, (x.dim(dim),)))


@rule("topk")
def topk(x: Arg, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """The best k along a whole dim."""
    out = put(x.letters, {x.dim(dim): "1" if k == 1 else "best"})
    return notation({x: x.letters}, out, out, whole="best", sizes={"best": k})


@rule("quantile", "nanquantile")
def quantile(x: Arg, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Along a whole dim; a vector of quantiles leads the result."""
    listed = {q: names("q", q.shape)} if isinstance(q, Arg) else {}
    lead = [f for letters in listed.values() for f in letters]
    out = [*lead, *without(x.letters, dims_of(x.ndim, dim), keepdim)]
    return notation({x: x.letters, **listed}, out, whole=lead, padded=True)


@rule("diff")
def diff(x: Arg, n: int = 1, dim: int = -1, prepend: Arg | None = None, append: Arg | None = None) -> Rule | None:
    """Differences of neighbours; beside what is joined to its ends, along a whole dim."""
    ends = [t for t in (prepend, append) if t is not None]
    if not x.ndim or any(t.ndim != x.ndim for t in ends):
        return None
    if ends:
        d, own = x.dim(dim), {x: "end0", **{t: f"end{i}" for i, t in enumerate(ends, 1)}}
        lines = {t: [*x.letters[:d], letter, *x.letters[d + 1 :]] for t, letter in own.items()}
        length = max(0, sum(t.shape[d] for t in own) - n)
        out = [*x.letters[:d], "rest", *x.letters[d + 1 :]]
        return notation(
            lines, out, sizes={"rest": length}, whole=[*own.values(), "rest"], linear=[tuple(own)], padded=True
        )
    d, (shape,) = x.dim(dim), meta_shapes(torch.diff, x, n, dim)
    way = crossing.windows(d, shape[d], n + 1, 1, lambda x: torch.diff(x, n, d))
    return crossing.along(x, {d: way}, why="a difference needs the rows behind a part", linear=[x])
