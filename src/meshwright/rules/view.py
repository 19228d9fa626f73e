"""Ops that only move elements: any Partial passes, splits follow.  Sizes in arguments are global."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import crossing
from .dims import dims_of, flat_ints, meta_shapes, names, put, sizes_of
from .factor_notation import Arg, Letters, Local, LocalFn, Native, Rule, composite, lines, notation, rule
from .factors import match

Tensor = torch.Tensor


def moved(x: Arg, out: Letters, *, letters: Letters | None = None, linear: bool = True, **flags: Any) -> Rule:
    """The rule of an op on one tensor that moves elements."""
    given = x.letters if letters is None else letters
    return notation({x: given}, out, linear=[x] if linear else [], moves=True, **flags)


# ------------------------------------------------------------------------------------------------ reshape


def reshaped(x: Arg, want: Sequence[int], how: str = "reshape") -> Rule:
    """``x`` with global shape ``want``, where -1 may stand for one dim."""
    want = list(want)
    if -1 in want:
        at = want.index(-1)
        rest = math.prod(n for n in want if n != -1)
        want[at] = math.prod(x.shape) // rest if rest else 0
    if math.prod(want) != math.prod(x.shape):
        raise ValueError(f"a tensor of shape {x.shape} cannot become {tuple(want)}")
    ins, outs, sizes, whole = match(x.shape, want)

    def local(ctx: Local) -> LocalFn | None:
        shape = ctx.out_shape()
        if how == "view":
            # A shard cut out of a larger tensor may need a copy where the whole did not.
            return Native(Tensor.view, shape, otherwise=Tensor.reshape)
        return Native(Tensor.reshape, shape)

    return moved(x, outs, letters=ins, whole=whole, sizes=sizes, local=local, blockwise=True)


@rule("view", "_unsafe_view")
def view(x: Arg, *shape: Any) -> Rule | None:
    """As reshape; ``view(dtype)`` reinterprets elements, possibly more or fewer along the last dim."""
    if isinstance(shape[0], torch.dtype):
        return _retyped(x, shape[0])
    return reshaped(x, flat_ints(shape), "view")


def _retyped(x: Arg, dtype: torch.dtype) -> Rule:
    if dtype.itemsize == x.dtype.itemsize:
        return moved(x, x.letters, linear=False)
    last = x.shape[-1] * x.dtype.itemsize // dtype.itemsize
    return moved(x, [*x.letters[:-1], "last"], whole=[x.letters[-1], "last"], sizes={"last": last}, linear=False)


@rule("flatten")
def flatten(x: Arg, start_dim: int = 0, end_dim: int = -1) -> Rule:
    """Dims from start to end become one."""
    if x.ndim == 0:
        return reshaped(x, [1])
    s, e = x.dim(start_dim), x.dim(end_dim)
    if s == e:  # PyTorch returns the tensor itself
        return moved(x, x.letters)
    return reshaped(x, [*x.shape[:s], math.prod(x.shape[s : e + 1]), *x.shape[e + 1 :]])


@rule("unflatten")
def unflatten(x: Arg, dim: int, sizes: Any, *args: Any) -> Rule:
    """One dim becomes several."""
    d, into = x.dim(dim), list(flat_ints([sizes]))
    if -1 in into:
        into[into.index(-1)] = x.shape[d] // max(math.prod(n for n in into if n != -1), 1)
    return reshaped(x, [*x.shape[:d], *into, *x.shape[d + 1 :]])


@composite("view_as")
def view_as(x: Any, other: Any) -> Any:
    """The other tensor only lends its shape."""
    return x.view(other.shape)


@composite("reshape_as")
def reshape_as(x: Any, other: Any) -> Any:
    """The other tensor only lends its shape."""
    return x.reshape(other.shape)


def _expanded(x: Arg, shape: Sequence[int], other: Arg | None = None) -> Rule:
    """Dims of size 1 repeat without a copy; the repeats may be split, too, as those of ``other`` are."""
    letters = ["1"] * (len(shape) - x.ndim) + x.letters
    out = [f if f != "1" else made for f, made in zip(letters, names("n", shape), strict=True)]
    return notation(
        {x: x.letters, other: out}, out, sizes=sizes_of(out, shape), linear=[x], moves=True,
        lends=[other] if other else [], local=lambda ctx: Native(Tensor.expand, ctx.out_shape()), blockwise=True,
    )  # fmt: skip


@rule("expand", "broadcast_to")
def expand(x: Arg, *sizes: Any, **kwargs: Any) -> Rule:
    """The sizes said, where -1 keeps one."""
    want = flat_ints(sizes)
    given = [*[0] * (len(want) - x.ndim), *x.shape]
    return _expanded(x, [given[i] if n == -1 else n for i, n in enumerate(want)])


# -------------------------------------------------------------------------------------------- order of dims


def _permuted(x: Arg, order: Sequence[int]) -> Rule:
    return moved(x, [x.letters[d] for d in order])


@rule("transpose", "swapaxes", "swapdims")
def transpose(x: Arg, *dims: int) -> Rule:
    """Two dims change places."""
    a, b = map(x.dim, dims)
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return _permuted(x, order)


def _last_two_swapped(x: Arg) -> Rule:
    return _permuted(x, [*range(x.ndim)[:-2], *range(x.ndim)[-2:][::-1]])


@rule("movedim", "moveaxis")
def movedim(x: Arg, source: Any, destination: Any) -> Rule:
    """Some dims go to other places, the rest keeps its order."""
    src, dst = dims_of(x.ndim, source), dims_of(x.ndim, destination)
    rest = iter([d for d in range(x.ndim) if d not in src])
    target = dict(zip(dst, src, strict=True))
    return _permuted(x, [target[i] if i in target else next(rest) for i in range(x.ndim)])


# --------------------------------------------------------------------------------------------- sizes of one


def _squeezed(x: Arg, dim: Any, op: Callable[..., Tensor]) -> Rule:
    """Without the dims of global size 1; a dim that is 1 only here, in this shard, stays."""
    given = range(x.ndim) if dim is None else dims_of(x.ndim, dim) if dim != () else ()
    dims = tuple(d for d in given if x.shape[d] == 1)
    return moved(x, put(x.letters, dict.fromkeys(dims)), local=lambda ctx: Native(op, dims), blockwise=True)


@rule("unsqueeze")
def unsqueeze(x: Arg, dim: int) -> Rule:
    """A new dim of size 1."""
    out = x.letters
    out.insert(dim % (x.ndim + 1), "1")
    return moved(x, out)


@composite("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> Any:
    """All expanded to their common shape."""
    listed = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    shape = torch.broadcast_shapes(*[t.shape for t in listed])
    return tuple(t.expand(shape) for t in listed)


@composite("meshgrid")
def meshgrid(*tensors: Any, indexing: str = "ij") -> Any:
    """Each tensor along its own dim of a grid."""
    listed = list(tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors)
    swap = indexing == "xy" and len(listed) > 1
    order = [1, 0, *range(2, len(listed))] if swap else list(range(len(listed)))
    shape = [listed[i].numel() for i in order]
    return tuple(
        t.reshape([-1 if order[d] == i else 1 for d in range(len(listed))]).expand(shape) for i, t in enumerate(listed)
    )


def _each(fn: Callable[[Any], Any]) -> Callable[..., Any]:
    def over(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return fn(tensors[0])
        listed = tensors[0] if len(tensors) == 1 else tensors
        return tuple(fn(t) for t in listed)

    return over


def at_least_1d(x: Any) -> Any:
    """``atleast_1d`` of one tensor."""
    return x.reshape(1) if x.ndim == 0 else x


def at_least_2d(x: Any) -> Any:
    """``atleast_2d`` of one tensor."""
    return x.reshape(1, 1) if x.ndim == 0 else x.unsqueeze(0) if x.ndim == 1 else x


def at_least_3d(x: Any) -> Any:
    """``atleast_3d`` of one tensor."""
    x = at_least_2d(x)
    return x.unsqueeze(-1) if x.ndim == 2 else x


for _name, _fn in (("atleast_1d", at_least_1d), ("atleast_2d", at_least_2d), ("atleast_3d", at_least_3d)):
    composite(_name)(_each(_fn))


# ------------------------------------------------------------------------------------------------ repeats


def _repeated(x: Arg, reps: Sequence[int]) -> Rule:
    letters = ["1"] * (len(reps) - x.ndim) + x.letters
    sizes = {f"r{i}": n for i, n in enumerate(reps) if n != 1}
    # Repeats are major: only a dim that is not repeated may be split.
    out = [(f"r{i}", f) if f"r{i}" in sizes else f for i, f in enumerate(letters)]
    return moved(x, out, whole=sizes, sizes=sizes)


@rule("repeat_interleave")
def repeat_interleave(x: Arg, repeats: Any = None, dim: int | None = None, **kwargs: Any) -> Rule | None:
    """Each element several times in a row; a count per element has no rule."""
    if not isinstance(repeats, int) or isinstance(repeats, bool) or not x.ndim or (dim is None and x.ndim > 1):
        return None
    d = x.dim(dim or 0)
    return moved(x, put(x.letters, {d: (x.letters[d], "r")}), whole="r", sizes={"r": repeats})


# --------------------------------------------------------------------------------------- windows, diagonals


@rule("unfold")
def unfold(x: Arg, dimension: int, size: int, step: int) -> Rule | None:
    """Windows along a dim."""
    if not x.ndim:
        return None
    d = x.dim(dimension)
    way = crossing.windows(d, (x.shape[d] - size) // step + 1, size, step, lambda x: x.unfold(d, size, step))
    return crossing.along(
        x, {d: way}, behind=["in"], why="windows reach into the next part", sizes={"in": size}, whole=["in"],
        linear=[x], moves=True,
    )  # fmt: skip


def _flipped(x: Arg, dims: Sequence[int]) -> Rule:
    ways = {d: crossing.flipped(d, x.shape[d]) for d in dims}
    return crossing.along(x, ways, why="the first rows become the last ones", linear=[x], moves=True)


@rule("roll")
def roll(x: Arg, shifts: Any, dims: Any = None) -> Rule:
    """Rows that go round; of a tensor as one vector where no dims are given."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return moved(x, x.letters, whole=[f for f in x.letters if f != "1"])
    by, ways = list(shifts) if isinstance(shifts, (tuple, list)) else [shifts], dict[int, int]()
    for d, shift in zip(dims_of(x.ndim, dims), by, strict=True):
        ways[d] = ways.get(d, 0) + shift
    made = {d: crossing.rolled(d, x.shape[d], shift) for d, shift in ways.items()}
    return crossing.along(x, made, why="rows go round", linear=[x], moves=True)


@rule("rot90")
def rot90(x: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> Rule:
    """The plane that turns stays whole."""
    a, b = map(x.dim, dims)
    plane = x.letters[a], x.letters[b]
    turned = {a: plane[1], b: plane[0]} if k % 2 else {}
    return moved(x, put(x.letters, turned), whole=plane)


def _triangle(op: Callable[..., Tensor]) -> Callable[..., Rule]:
    def triangle(x: Arg, diagonal: int = 0, **kwargs: Any) -> Rule:
        def local(ctx: Local) -> LocalFn | None:
            row, col = (ctx.bounds(f)[0] for f in x.letters[-2:])
            if row == col:
                return None
            # Row i here is row i + row of the whole, and so for columns: the diagonal shifts by the rest.
            return lambda x, diagonal=0, **kwargs: op(x, diagonal + row - col)

        return moved(x, x.letters, local=local)

    return triangle


@composite("tril_")
def tril_(x: Any, diagonal: int = 0) -> Any:
    """In place, by way of a copy: a shard's own diagonal is another one."""
    return x.copy_(torch.tril(x, diagonal))


@composite("triu_")
def triu_(x: Any, diagonal: int = 0) -> Any:
    """In place, by way of a copy: a shard's own diagonal is another one."""
    return x.copy_(torch.triu(x, diagonal))


def _from_meta(x: Arg, fn: Callable[..., Any], *args: Any, dims: Sequence[int]) -> Rule:
    """Rule of an op that keeps its leading dims and makes new last ones from the whole ``dims``."""
    kept = put(x.letters, dict.fromkeys(dims))
    (shape,) = meta_shapes(fn, x, *args)
    made = names("m", shape)[len(kept) :]
    sizes = sizes_of(made, shape[len(kept) :])
    return moved(x, [*kept, *made], whole=[*(x.letters[d] for d in dims), *made], sizes=sizes)


@rule("diagonal", "linalg_diagonal")
def diagonal(x: Arg, offset: int = 0, dim1: int | None = None, dim2: int | None = None, **kwargs: Any) -> Rule | None:
    """The two dims of the plane stay whole (the default ones depend on the function: they must be given)."""
    if dim1 is None or dim2 is None:
        if x.ndim != 2:
            return None
        dim1, dim2 = 0, 1
    return _from_meta(x, torch.diagonal, offset, dim1, dim2, dims=dims_of(x.ndim, (dim1, dim2)))


@rule("diag_embed")
def diag_embed(x: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Rule | None:
    """The last dim becomes the diagonal of new matrices."""
    if sorted(d % (x.ndim + 1) for d in (dim1, dim2)) != [x.ndim - 1, x.ndim]:
        return None
    return _from_meta(x, torch.diag_embed, offset, dim1, dim2, dims=[x.ndim - 1])


def _pixels(x: Arg, text: str, r: int) -> Rule:
    return notation(text, x, sizes={"p": r, "q": r}, whole="p q", linear=[x], moves=True, padded=True)


def _as_real(x: Tensor) -> Tensor:
    """``view_as_real``, whose backward takes no gradient without elements that was expanded (as that of a sum is): its
    strides are 0, which ``contiguous`` leaves where there is nothing to lay out."""
    made = torch.view_as_real(x)
    if made.requires_grad and not Tensor.numel(made):
        Tensor.register_hook(made, lambda g: g.clone(memory_format=torch.contiguous_format))
    return made


lines({
    # Factors that both shapes have at the same place may be split.
    "ravel": lambda x: reshaped(x, [math.prod(x.shape)]),
    "reshape _reshape_alias": lambda x, *shape: reshaped(x, flat_ints(shape)),
    # The other tensor only lends its shape, and its splits where they fit.
    "expand_as": lambda x, other: _expanded(x, other.shape, other),
    "permute": lambda x, *dims: _permuted(x, [x.dim(d) for d in flat_ints(dims)]),
    "repeat": lambda x, *repeats: _repeated(x, flat_ints(repeats)),
    "tile": lambda x, *dims: _repeated(x, [1] * (x.ndim - len(flat_ints(dims))) + [*flat_ints(dims)]),
    "flip": lambda x, *dims: _flipped(x, dims_of(x.ndim, flat_ints(dims)) if flat_ints(dims) else ()),
    "view_as_real": lambda x: moved(
        x, [*x.letters, "two"], whole=["two"], sizes={"two": 2}, local=lambda ctx: Native(_as_real)
    ),
    # The last dim of two becomes real and imaginary part; complex numbers have no order: a maximum is reduced.
    "view_as_complex": lambda x: notation({x: [*x.letters[:-1], "two"]}, x.letters[:-1], linear=[x]),
    "T numpy_T": lambda x: _permuted(x, range(x.ndim)[::-1]),
    "t mT H mH adjoint matrix_H": _last_two_swapped,
    "squeeze": lambda x, dim=None, *more: _squeezed(x, (dim, *more) if more else dim, Tensor.squeeze),
    "squeeze_": lambda x, dim=None, *more: _squeezed(x, (dim, *more) if more else dim, Tensor.squeeze_),
    "fliplr": lambda x: _flipped(x, [1]),
    "flipud": lambda x: _flipped(x, [0]),
    "tril": _triangle(torch.tril),
    "triu": _triangle(torch.triu),
    "diag": lambda x, diagonal=0, **kwargs: _from_meta(x, torch.diag, diagonal, dims=range(x.ndim)),
    "pixel_shuffle": lambda x, upscale_factor: _pixels(x, "... (c p q) h w -> ... c (h p) (w q)", upscale_factor),
    "pixel_unshuffle": lambda x, downscale_factor: _pixels(x, "... c (h p) (w q) -> ... (c p q) h w", downscale_factor),
})  # fmt: skip

# ---------------------------------------------------------------------------------------------- copies of views

_VIEWS = (
    "diagonal", "expand", "narrow", "permute", "select", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
)  # fmt: skip


def _copied(view: str) -> None:
    fn = getattr(Tensor, view, None) or getattr(torch, view)

    @composite(f"{view}_copy")
    def copied(x: Any, *args: Any, **named: Any) -> Any:
        made = fn(x, *args, **named)
        many = isinstance(made, tuple | list)
        whole = [t.clone(memory_format=torch.contiguous_format) for t in (made if many else [made])]
        return tuple(whole) if many else whole[0]


for _view in _VIEWS:
    _copied(_view)
