"""Reductions: partial results where a reduced dim is split, or a composition with one device's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .core import Arg, Local, LocalFn, Rule, composite, notation, rule
from .dims import bool_free, dims_of, meta_shapes, names, nothing, unless_empty, where_split, without
from .reduce_parts import carrier, extremum, first_index, partial_prod, whole_prod

Tensor = torch.Tensor


def reduction(
    x: Arg,
    dim: Any,
    keepdim: bool = False,
    *,
    op: str | None = None,
    outputs: int = 1,
    linear: bool = False,
    local: Callable[[Sequence[str]], Callable[[Local], LocalFn | None]] | None = None,
    decompose: Callable[..., Any] | None = None,
) -> Rule:
    """The rule of a reduction of ``dim``: Partial(``op``) where it may be split, whole without ``op``."""
    letters, dims = x.letters, dims_of(x.ndim, dim)
    over = [letters[d] for d in dims if letters[d] != "1"]
    out = " ".join(without(letters, dims, bool(keepdim)))
    return notation(
        f"{' '.join(letters)} -> {', '.join([out] * outputs)}",
        x,
        whole="" if op else " ".join(over),
        reduced=dict.fromkeys(over, op) if op else "",
        linear=bool_free([x]) if linear else (),
        local=local(over) if local else None,
        decompose=decompose,
    )


def _named(kwargs: dict[str, Any], dim: Any, keepdim: bool) -> tuple[Any, bool]:
    """NumPy's spelling of the arguments, which PyTorch takes too."""
    return kwargs.get("axis", dim), kwargs.get("keepdims", keepdim)


# ------------------------------------------------------------------------------------------------ sums


@rule("sum")
def sum_(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Sums of the parts are parts of the sum."""
    return reduction(x, *_named(kwargs, dim, keepdim), op="sum", linear=True)


@rule("nansum")
def nansum(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Not linear: a NaN may come about only when parts are added."""
    return reduction(x, dim, keepdim, op="sum")


@rule("mean")
def mean(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Sum of the part over the global count: shards may be uneven, so never a mean of means."""
    dim, keepdim = _named(kwargs, dim, keepdim)
    dims = dims_of(x.ndim, dim)
    count = math.prod(x.shape[d] for d in dims)

    def local(t: Tensor, *args: Any, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        dtype = dtype or t.dtype
        # A half precision sum may overflow where the mean does not.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = t.sum(dims, keepdim=keepdim, dtype=wide)
        return (total / count if count else total * math.nan).to(dtype)

    return reduction(x, dim, keepdim, op="sum", linear=True, local=lambda over: where_split(over, local))


@composite("nanmean")
def nanmean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    """Sum and count of what is not NaN."""
    dims = list(range(x.ndim)) if dim is None else dim
    count = torch.sum(~torch.isnan(x), dims, keepdim)
    return torch.nansum(x, dims, keepdim, dtype=dtype) / count


@rule("count_nonzero")
def count_nonzero(x: Arg, dim: Any = None) -> Rule:
    """Counts add up."""
    return reduction(x, dim, op="sum")


@rule("trace")
def trace(x: Arg) -> Rule:
    """Rows and columns belong together: both stay whole."""
    return notation("i j ->", x, linear=[[x]])


# ------------------------------------------------------------------------------------------- logic, product


@rule("any")
def any_(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Whether any is true (uint8 stays uint8, and its 0 and 1 go by the maximum)."""
    op = "max" if x.dtype == torch.uint8 else "any"
    return reduction(x, *_named(kwargs, dim, keepdim), op=op)


@rule("all")
def all_(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Whether all are true."""
    op = "min" if x.dtype == torch.uint8 else "all"
    return reduction(x, *_named(kwargs, dim, keepdim), op=op)


def _tracks(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _prod_composed(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    dim, keepdim = _named(kwargs, dim, keepdim)
    # Each factor's gradient is the product of all the others: it needs them all on one rank.
    return (whole_prod if _tracks(x) else partial_prod)(x, dim, keepdim, dtype)


@rule("prod")
def prod(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Products of the parts without gradients, else whole."""
    return reduction(x, *_named(kwargs, dim, keepdim), decompose=_prod_composed)


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

    @rule(f"a{word}")
    def values_rule(x: Arg, dim: Any = (), keepdim: bool = False, **kwargs: Any) -> Rule:
        return reduction(x, *_named(kwargs, dim, keepdim), decompose=values)

    def values(x: Any, dim: Any = (), keepdim: bool = False, **kwargs: Any) -> Any:
        return _extreme(x, *_named(kwargs, dim, keepdim), largest)

    @rule(word)
    def word_rule(x: Arg, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule | None:
        dim = kwargs.get("other", dim)
        if isinstance(dim, Arg):
            return notation("..., ... -> ...", x, dim)
        dim, keepdim = _named(kwargs, dim, keepdim)
        return reduction(x, dim, keepdim, outputs=1 if dim is None else 2, decompose=word_composed)

    def word_composed(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        dim, keepdim = _named(kwargs, dim, keepdim)
        return _extreme(x, (), False, largest) if dim is None else result(_selected(x, dim, keepdim, largest))

    @rule(f"arg{word}")
    def position_rule(x: Arg, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Rule:
        return reduction(x, *_named(kwargs, dim, keepdim), decompose=position)

    def position(x: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Any:
        return _position(x, *_named(kwargs, dim, keepdim), largest)


_register_extrema("max", True)
_register_extrema("min", False)


@rule("aminmax")
def aminmax(x: Arg, *, dim: int | None = None, keepdim: bool = False) -> Rule:
    """Both extrema."""
    return reduction(x, dim, keepdim, outputs=2, decompose=_aminmax_composed)


def _aminmax_composed(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    pair = _extreme(x, dim, keepdim, False), _extreme(x, dim, keepdim, True)
    return torch.return_types.aminmax(pair)


# ------------------------------------------------------------------------------------------------ moments


def _moment_args(
    dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: bool | None = None, **kwargs: Any
) -> tuple[Any, Any, bool]:
    """(dim, correction, keepdim) from all the ways to call var: ``var(x, True)``, ``var(x, 0, False)``..."""
    dim, keepdim = _named(kwargs, dim, keepdim)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if isinstance(correction, bool):
        unbiased = correction
    if unbiased is not None:
        correction = int(unbiased)
    return dim, 1 if correction is None else correction, keepdim


def _var(x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Variance and mean, from the differences to the global mean."""
    dim, correction, keepdim = _moment_args(*args, **kwargs)
    dims = dims_of(x.ndim, dim)
    count = math.prod(x.shape[d] for d in dims)
    center = torch.mean(x, dims, keepdim=True)
    off = x - center
    square = off * off if not off.is_complex() else (off * off.conj()).real
    rest = max(count - correction, 0)
    variance = torch.sum(square, dims, keepdim=keepdim)
    variance = variance / rest if rest else variance / torch.zeros((), dtype=variance.dtype)
    return variance, center if keepdim else center.squeeze(dims)


def _root(square: Any) -> Any:
    """Square root whose gradient at zero is zero, as PyTorch has it for std and norm."""
    zero = square == 0
    return torch.sqrt(square.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


_MOMENTS: dict[str, Callable[..., Any]] = {
    "var": lambda x, *a, **k: _var(x, a, k)[0],
    "std": lambda x, *a, **k: _root(_var(x, a, k)[0]),
    "var_mean": lambda x, *a, **k: _var(x, a, k),
    "std_mean": lambda x, *a, **k: _std_mean(*_var(x, a, k)),
}


def _std_mean(variance: Any, center: Any) -> tuple[Any, Any]:
    return _root(variance), center


def _register_moments() -> None:
    for name, composed in _MOMENTS.items():

        def moment(x: Arg, *args: Any, _name: str = name, _composed: Any = composed, **kwargs: Any) -> Rule | None:
            dim, _, keepdim = _moment_args(*args, **kwargs)
            outputs = 2 if _name.endswith("_mean") else 1
            return reduction(x, dim, keepdim, outputs=outputs, decompose=_composed)

        rule(name)(moment)


_register_moments()


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


@rule("linalg_vector_norm")
def linalg_vector_norm(x: Arg, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Any order; the sum of absolute values is a sum."""
    return reduction(x, dim, keepdim, op="sum" if ord == 1 else None, decompose=_vector_norm)


@rule("linalg_norm")
def linalg_norm(x: Arg, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule | None:
    """Vector norms and the Frobenius norm; other matrix norms are gathered."""
    pair = x.ndim == 2 if dim is None else len(dims_of(x.ndim, dim)) == 2
    if isinstance(ord, str) and ord != "fro":
        return None
    if ord is None or not pair or ord == "fro":
        return reduction(x, dim, keepdim, decompose=_linalg_norm_composed)
    return None


def _linalg_norm_composed(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    return torch.linalg.vector_norm(x, 2 if ord in (None, "fro") else ord, dim, keepdim, **kwargs)


@composite("dist")
def dist(x: Any, other: Any, p: float = 2) -> Any:
    """Norm of the difference."""
    return torch.linalg.vector_norm(x - other, p)


def _logsumexp_composed(x: Any, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    dim, keepdim = _named(kwargs, dim, keepdim)
    dims = dims_of(x.ndim, dim)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    if any(x.shape[d] == 0 for d in dims):  # of nothing there is no maximum
        return torch.log(torch.sum(torch.exp(x), dims, keepdim=keepdim))
    top = _best(x, dims, True)
    top = top.masked_fill(torch.isinf(top), 0.0)
    made = torch.log(torch.sum(torch.exp(x - top), dims, keepdim=True)) + top
    return made if keepdim else made.squeeze(dims)


@rule("logsumexp", "special_logsumexp")
def logsumexp(x: Arg, dim: Any, keepdim: bool = False, **kwargs: Any) -> Rule | None:
    """Global maximum (a constant), then the log of the sum."""
    if x.dtype.is_complex:
        return None
    return reduction(x, *_named(kwargs, dim, keepdim), decompose=_logsumexp_composed)


# ----------------------------------------------------------------------------------------- along whole dims


def _along(x: Arg, dim: int, outputs: int = 1, linear: bool = False, local: Any = None) -> Rule:
    letters = x.letters
    d = x.dim(dim)
    out = " ".join(letters)
    whole = letters[d] if x.ndim and letters[d] != "1" else ""
    text = f"{out} -> {', '.join([out] * outputs)}"
    return notation(text, x, whole=whole, linear=bool_free([x]) if linear else (), local=local)


@rule("cumsum")
def cumsum(x: Arg, dim: int, **kwargs: Any) -> Rule:
    """Linear, along a whole dim."""
    return _along(x, kwargs.get("axis", dim), linear=True)


@rule("logcumsumexp")
def cumulative(x: Arg, dim: int, **kwargs: Any) -> Rule:
    """Along a whole dim."""
    return _along(x, dim)


@rule("cumprod")
def cumprod(x: Arg, dim: int, **kwargs: Any) -> Rule:
    """Along a whole dim."""

    def local(ctx: Local) -> LocalFn | None:
        if math.prod(ctx.in_shape()) > 1 or math.prod(x.shape) <= 1:
            return None

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = torch.cumprod(x, *args, **kwargs)
            return made + nothing((), x.exp())  # of one element PyTorch's derivative is a constant

        return run

    return _along(x, dim, local=local)


@rule("cummax", "cummin")
def cumulative_pair(x: Arg, dim: int, **kwargs: Any) -> Rule:
    """Values and indices along a whole dim."""
    return _along(x, dim, outputs=2)


@rule("sort")
def sort(x: Arg, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """Values and indices along a whole dim."""
    return _along(x, kwargs.get("dim", -1) if isinstance(dim, bool) else dim, outputs=2)


@rule("argsort")
def argsort(x: Arg, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """Indices along a whole dim."""
    return _along(x, kwargs.get("dim", -1) if isinstance(dim, bool) else dim)


@rule("msort")
def msort(x: Arg) -> Rule:
    """Sort along the first dim."""
    return _along(x, 0)


@rule("renorm")
def renorm(x: Arg, p: Any, dim: int, maxnorm: Any) -> Rule:
    """Each slice along ``dim`` by its own norm: every other dim stays whole."""
    letters, d = x.letters, x.dim(dim)
    whole = " ".join(f for i, f in enumerate(letters) if i != d and f != "1")
    return notation(f"{' '.join(letters)} -> {' '.join(letters)}", x, whole=whole)


@rule("topk")
def topk(x: Arg, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """The best k along a whole dim."""
    letters = x.letters
    out = list(letters)
    if x.ndim:
        out[x.dim(dim)] = "1" if k == 1 else "best"
    text = f"{' '.join(letters)} -> {' '.join(out)}, {' '.join(out)}"
    return notation(text, x, whole="best", sizes={"best": k})


@rule("kthvalue")
def kthvalue(x: Arg, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    """Along a whole dim."""
    return reduction(x, (dim,), keepdim, outputs=2)


@rule("mode")
def mode(x: Arg, dim: int = -1, keepdim: bool = False) -> Rule:
    """Along a whole dim."""
    return reduction(x, (dim,), keepdim, outputs=2)


@rule("median", "nanmedian")
def median(x: Arg, dim: int | None = None, keepdim: bool = False) -> Rule:
    """Along a whole dim (values and indices), or of everything."""
    return reduction(x, dim, keepdim, outputs=1 if dim is None else 2)


@rule("quantile", "nanquantile")
def quantile(x: Arg, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Along a whole dim; a vector of quantiles leads the result."""
    letters, dims = x.letters, dims_of(x.ndim, dim)
    over = [letters[d] for d in dims if letters[d] != "1"]
    listed = names("q", q.shape) if isinstance(q, Arg) else []
    out = " ".join([*listed, *without(letters, dims, keepdim)])
    text = f"{' '.join(letters)}{', ' + ' '.join(listed) if isinstance(q, Arg) else ''} -> {out}"
    given = [x, q] if isinstance(q, Arg) else [x]
    smooth = kwargs.get("interpolation", "linear") == "linear"

    def local(ctx: Local) -> LocalFn | None:
        if unless_empty(ctx) is None:
            return None
        shape = ctx.out_shape()
        # The op refuses empty tensors; the result depends on q only where it interpolates.
        return lambda x, q, *args, **kwargs: nothing(shape, x, *([q] if smooth and given[1:] else []))

    return notation(text, *given, whole=" ".join([*over, *listed]), local=local)


@rule("diff")
def diff(x: Arg, n: int = 1, dim: int = -1, prepend: Arg | None = None, append: Arg | None = None) -> Rule | None:
    """Differences of neighbours along a whole dim."""
    if prepend is not None or append is not None or not x.ndim:
        return None
    letters, d = x.letters, x.dim(dim)
    out, (shape,) = list(letters), meta_shapes(torch.diff, x, n, dim)
    out[d] = "1" if shape[d] == 1 else "rest"
    text = f"{' '.join(letters)} -> {' '.join(out)}"
    return notation(text, x, whole="rest", sizes={"rest": shape[d]}, linear=bool_free([x]))
