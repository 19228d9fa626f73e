"""Ops that only move elements: any Partial passes, splits follow.  Sizes in arguments are global."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .core import Arg, Local, LocalFn, Native, Rule, composite, notation, rule
from .dims import dims_of, flat_ints, meta_shapes, names, sizes_of, unless_empty

Tensor = torch.Tensor


def moved(
    x: Arg,
    letters: Sequence[str],
    out: Sequence[str],
    *,
    whole: Sequence[str] = (),
    sizes: dict[str, int] | None = None,
    local: Callable[[Local], LocalFn | None] | None = None,
    linear: bool = True,
) -> Rule:
    """The rule of an op on one tensor that moves elements."""
    text = f"{' '.join(letters)} -> {' '.join(out)}"
    kept = " ".join(f for f in whole if f != "1")
    return notation(text, x, whole=kept, sizes=sizes, linear=[[x]] if linear else (), moves=True, local=local)


# ------------------------------------------------------------------------------------------------ reshape


def match(
    have: Sequence[int], want: Sequence[int]
) -> tuple[list[list[str]], list[list[str]], dict[str, int], set[str]]:
    """Common factors of two shapes of the same number of elements.

    Returns the factors of each dim of both, the sizes of the factors, and those that stand in one shape only
    (which must stay whole).  Dims are matched from the left, so a factor of both has one place in memory.
    """
    ins: list[list[str]] = [[] for _ in have]
    outs: list[list[str]] = [[] for _ in want]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    i = j = 0
    a, b = 1, 1  # what is left of the dims before i and j

    def add(places: list[list[list[str]]], at: list[int], size: int) -> str:
        f = f"v{len(sizes)}"
        sizes[f] = size
        for place, k in zip(places, at, strict=True):
            place[k].append(f)
        return f

    if 0 in have:  # no element, so none has a place: equal dims at both ends correspond, the rest need not
        most = min(len(have), len(want))
        lead = next((k for k in range(most) if have[k] != want[k]), most)
        tail = next((k for k in range(most - lead) if have[-1 - k] != want[-1 - k]), most - lead)
        for k in [*range(lead), *range(-tail, 0)]:
            if have[k] != 1:
                add([ins, outs], [k, k], have[k])
        for dims, shape in ((ins, have), (outs, want)):
            whole |= {add([dims], [k], shape[k]) for k in range(lead, len(shape) - tail) if shape[k] != 1}
        return ins, outs, sizes, whole
    while True:
        while a == 1 and i < len(have):
            a, i = have[i], i + 1
        while b == 1 and j < len(want):
            b, j = want[j], j + 1
        if a == 1 and b == 1:
            return ins, outs, sizes, whole
        shared = math.gcd(a, b)
        if shared > 1:
            add([ins, outs], [i - 1, j - 1], shared)
            a, b = a // shared, b // shared
            if a == 1 or b == 1:
                continue
        # Nothing more in common until both sides have consumed the same number of elements.
        left, right = a, b
        whole.add(add([ins], [i - 1], a))
        whole.add(add([outs], [j - 1], b))
        while left != right:
            if i < len(have) and (left <= right or j == len(want)):
                left *= have[i]
                if have[i] != 1:
                    whole.add(add([ins], [i], have[i]))
                i += 1
            else:
                right *= want[j]
                if want[j] != 1:
                    whole.add(add([outs], [j], want[j]))
                j += 1
        a, b = 1, 1


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

    def text(dims: list[list[str]]) -> list[str]:
        return [f"({' '.join(d)})" if len(d) > 1 else (d[0] if d else "1") for d in dims]

    return moved(x, text(ins), text(outs), whole=sorted(whole), sizes=sizes, local=local)


@rule("reshape", "_reshape_alias")
def reshape(x: Arg, *shape: Any, **kwargs: Any) -> Rule:
    """Factors that both shapes have at the same place may be split."""
    return reshaped(x, kwargs["shape"] if "shape" in kwargs else flat_ints(shape))


@rule("view", "_unsafe_view")
def view(x: Arg, *shape: Any, **kwargs: Any) -> Rule | None:
    """As reshape; ``view(dtype)`` reinterprets elements, possibly more or fewer along the last dim."""
    dtype = kwargs.get("dtype", shape[0] if shape else None)
    if isinstance(dtype, torch.dtype):
        return _retyped(x, dtype)
    return reshaped(x, kwargs["size"] if "size" in kwargs else flat_ints(shape), "view")


def _retyped(x: Arg, dtype: torch.dtype) -> Rule | None:
    letters = x.letters
    if dtype.itemsize == x.dtype.itemsize:
        return moved(x, letters, letters, linear=False)
    last = x.shape[-1] * x.dtype.itemsize // dtype.itemsize
    out = [*letters[:-1], "1" if last == 1 else "last"]
    return moved(x, letters, out, whole=[letters[-1], "last"], sizes={"last": last}, linear=False)


@rule("flatten", "ravel")
def flatten(x: Arg, start_dim: int = 0, end_dim: int = -1) -> Rule:
    """Dims from start to end become one."""
    if x.ndim == 0:
        return reshaped(x, [1])
    s, e = x.dim(start_dim), x.dim(end_dim)
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


@rule("expand_as")
def expand_as(x: Arg, other: Arg) -> Rule:
    """The other tensor only lends its shape, and its splits where they fit."""
    letters = ["1"] * (other.ndim - x.ndim) + x.letters
    out = [f if f != "1" else made for f, made in zip(letters, names("n", other.shape), strict=True)]
    text = f"{' '.join(x.letters)}, {' '.join(out)} -> {' '.join(out)}"
    made = notation(
        *(text, x, other),
        sizes=sizes_of(out, other.shape),
        linear=[[x]],
        moves=True,
        local=lambda ctx: Native(Tensor.expand, ctx.out_shape()),
    )
    return replace(made, lends=frozenset([other.index]))


@rule("view_as_real")
def view_as_real(x: Arg) -> Rule:
    """Real and imaginary part in a last dim of two."""
    return moved(x, x.letters, [*x.letters, "two"], whole=["two"], sizes={"two": 2})


@rule("view_as_complex")
def view_as_complex(x: Arg) -> Rule:
    """The last dim of two becomes real and imaginary part; complex numbers have no order: max is reduced."""
    return replace(moved(x, [*x.letters[:-1], "two"], x.letters[:-1]), moves=False)


# -------------------------------------------------------------------------------------------- order of dims


def _permuted(x: Arg, order: Sequence[int]) -> Rule:
    return moved(x, x.letters, [x.letters[d] for d in order])


@rule("permute")
def permute(x: Arg, *dims: Any, **kwargs: Any) -> Rule:
    """Dims in another order."""
    order = kwargs["dims"] if "dims" in kwargs else flat_ints(dims)
    return _permuted(x, [x.dim(d) for d in order])


@rule("transpose", "swapaxes", "swapdims")
def transpose(x: Arg, *dims: int, **kwargs: int) -> Rule:
    """Two dims change places."""
    a, b = (x.dim(d) for d in (*dims, *kwargs.values()))
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return _permuted(x, order)


@rule("T", "numpy_T")
def reversed_dims(x: Arg) -> Rule:
    """All dims in reverse order."""
    return _permuted(x, list(range(x.ndim))[::-1])


@rule("t", "mT", "H", "mH", "adjoint", "matrix_H")
def transposed(x: Arg) -> Rule:
    """The last two dims change places."""
    order = list(range(x.ndim))
    return _permuted(x, [*order[:-2], *order[-2:][::-1]])


@rule("movedim", "moveaxis")
def movedim(x: Arg, source: Any, destination: Any) -> Rule:
    """Some dims go to other places, the rest keeps its order."""
    src, dst = dims_of(x.ndim, source), dims_of(x.ndim, destination)
    rest = iter([d for d in range(x.ndim) if d not in src])
    target = dict(zip(dst, src, strict=True))
    return _permuted(x, [target[i] if i in target else next(rest) for i in range(x.ndim)])


# --------------------------------------------------------------------------------------------- sizes of one


def _squeezed(x: Arg, dim: Any, op: Callable[..., Tensor]) -> Rule:
    given = range(x.ndim) if dim is None else dims_of(x.ndim, dim) if dim != () else ()
    dims = tuple(d for d in given if x.shape[d] == 1)
    out = [f for d, f in enumerate(x.letters) if d not in dims]
    return moved(x, x.letters, out, local=lambda ctx: Native(op, dims))


@rule("squeeze")
def squeeze(x: Arg, dim: Any = None) -> Rule:
    """Drops dims of global size 1; a dim that is 1 only here, in this shard, stays."""
    return _squeezed(x, dim, Tensor.squeeze)


@rule("squeeze_")
def squeeze_(x: Arg, dim: Any = None) -> Rule:
    """As squeeze, in place."""
    return _squeezed(x, dim, Tensor.squeeze_)


@rule("unsqueeze")
def unsqueeze(x: Arg, dim: int) -> Rule:
    """A new dim of size 1."""
    out = x.letters
    out.insert(dim % (x.ndim + 1), "1")
    return moved(x, x.letters, out)


@rule("expand", "broadcast_to")
def expand(x: Arg, *sizes: Any, **kwargs: Any) -> Rule:
    """Dims of size 1 repeat without a copy; the repeats may be split, too."""
    want = kwargs.get("size", flat_ints(sizes))
    new = len(want) - x.ndim
    given = [*[0] * new, *x.shape]
    shape = [given[i] if n == -1 else n for i, n in enumerate(want)]
    letters = ["1"] * new + x.letters
    made = names("n", shape)
    out = [f if f != "1" else made[i] for i, f in enumerate(letters)]
    return moved(
        *(x, x.letters, out),
        sizes=sizes_of(out, shape),
        local=lambda ctx: Native(Tensor.expand, ctx.out_shape()),
    )


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
    new = len(reps) - x.ndim
    letters, out, sizes = x.letters, [], {}
    for i, n in enumerate(reps):
        f = letters[i - new] if i >= new else "1"
        if n != 1:
            sizes[f"r{i}"] = n
        # Repeats are major: only a dim that is not repeated may be split.
        out.append(f if n == 1 else f"r{i}" if f == "1" else f"(r{i} {f})")
    return moved(x, letters, out, whole=list(sizes), sizes=sizes)


@rule("repeat")
def repeat(x: Arg, *repeats: Any, **kwargs: Any) -> Rule:
    """Copies of the whole along dims."""
    return _repeated(x, kwargs.get("repeats", flat_ints(repeats)))


@rule("tile")
def tile(x: Arg, *dims: Any, **kwargs: Any) -> Rule:
    """As repeat, with ones for leading dims that are not named."""
    reps = list(kwargs.get("dims", flat_ints(dims)))
    return _repeated(x, [1] * (x.ndim - len(reps)) + reps)


@rule("repeat_interleave")
def repeat_interleave(x: Arg, repeats: Any = None, dim: int | None = None, **kwargs: Any) -> Rule | None:
    """Each element several times in a row; a count per element has no rule."""
    if not isinstance(repeats, int) or isinstance(repeats, bool) or not x.ndim:
        return None
    if dim is None and x.ndim > 1:
        return None
    d, letters = x.dim(dim or 0), x.letters
    out = list(letters)
    times = [] if repeats == 1 else ["r"]
    inner = [f for f in [letters[d]] if f != "1"] + times
    out[d] = f"({' '.join(inner)})" if len(inner) > 1 else inner[0] if inner else "1"
    return moved(x, letters, out, whole=times, sizes={"r": repeats})


# --------------------------------------------------------------------------------------- windows, diagonals


@rule("unfold")
def unfold(x: Arg, dimension: int, size: int, step: int) -> Rule | None:
    """Windows along a whole dim."""
    if not x.ndim:
        return None
    d, letters = x.dim(dimension), x.letters
    count = (x.shape[d] - size) // step + 1
    made = {f: n for f, n in (("win", count), ("in", size)) if n != 1}
    out = [*letters, "in" if size != 1 else "1"]
    out[d] = "win" if count != 1 else "1"
    return moved(x, letters, out, whole=[letters[d], *made], sizes=made)


def _whole(x: Arg, dims: Sequence[int]) -> Rule:
    return moved(x, x.letters, x.letters, whole=[x.letters[d] for d in dims])


@rule("flip")
def flip(x: Arg, *dims: Any, **kwargs: Any) -> Rule:
    """Flipped dims stay whole."""
    given = kwargs.get("dims", flat_ints(dims))
    return _whole(x, dims_of(x.ndim, given) if given else ())


@rule("fliplr")
def fliplr(x: Arg) -> Rule:
    """Flip of the second dim."""
    return _whole(x, [1])


@rule("flipud")
def flipud(x: Arg) -> Rule:
    """Flip of the first dim."""
    return _whole(x, [0])


@rule("roll")
def roll(x: Arg, shifts: Any, dims: Any = None) -> Rule:
    """Rolled dims stay whole."""
    return _whole(x, dims_of(x.ndim, dims))


@rule("rot90")
def rot90(x: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> Rule:
    """The plane that turns stays whole."""
    a, b = dims_of(x.ndim, dims)
    out = x.letters
    if k % 2:
        out[a], out[b] = out[b], out[a]
    return moved(x, x.letters, out, whole=[x.letters[a], x.letters[b]])


def _register_triangles() -> None:
    for name in ("tril", "triu"):
        op: Callable[..., Tensor] = getattr(torch, name)

        def triangle(x: Arg, diagonal: int = 0, op: Callable[..., Tensor] = op, **kwargs: Any) -> Rule:
            letters = x.letters

            def local(ctx: Local) -> LocalFn | None:
                row, col = (0 if f == "1" else ctx.bounds(f)[0] for f in letters[-2:])
                if row == col:
                    return None
                # Row i here is row i + row of the whole, and so for columns: the diagonal shifts by the rest.
                return lambda x, diagonal=0, **kwargs: op(x, diagonal + row - col)

            return moved(x, letters, letters, local=local)

        rule(name)(triangle)


_register_triangles()


@composite("tril_")
def tril_(x: Any, diagonal: int = 0) -> Any:
    """In place, by way of a copy: a shard's own diagonal is another one."""
    return x.copy_(torch.tril(x, diagonal))


@composite("triu_")
def triu_(x: Any, diagonal: int = 0) -> Any:
    """In place, by way of a copy: a shard's own diagonal is another one."""
    return x.copy_(torch.triu(x, diagonal))


def _from_meta(x: Arg, fn: Callable[..., Any], *args: Any, dims: Sequence[int], **kwargs: Any) -> Rule:
    """Rule of an op that keeps its leading dims and makes new last ones from the whole ``dims``."""
    letters = x.letters
    kept = [f for i, f in enumerate(letters) if i not in dims]
    (shape,) = meta_shapes(fn, x, *args, **kwargs)
    made = names("m", shape)[len(kept) :]
    return moved(
        *(x, letters, [*kept, *made]),
        whole=[*[letters[d] for d in dims], *made],
        sizes=sizes_of(made, shape[len(kept) :]),
    )


@rule("diagonal", "linalg_diagonal")
def diagonal(x: Arg, offset: int = 0, dim1: int | None = None, dim2: int | None = None, **kwargs: Any) -> Rule | None:
    """The two dims of the plane stay whole (the default ones depend on the function: they must be given)."""
    if dim1 is None or dim2 is None:
        if x.ndim != 2:
            return None
        dim1, dim2 = 0, 1
    return _from_meta(x, torch.diagonal, offset, dim1, dim2, dims=dims_of(x.ndim, (dim1, dim2)))


@rule("diag")
def diag(x: Arg, diagonal: int = 0, **kwargs: Any) -> Rule:
    """Vector to diagonal matrix, matrix to its diagonal."""
    return _from_meta(x, torch.diag, diagonal, dims=range(x.ndim))


@rule("diag_embed")
def diag_embed(x: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Rule | None:
    """The last dim becomes the diagonal of new matrices."""
    if sorted(d % (x.ndim + 1) for d in (dim1, dim2)) != [x.ndim - 1, x.ndim]:
        return None
    return _from_meta(x, torch.diag_embed, offset, dim1, dim2, dims=[x.ndim - 1])


@rule("pixel_shuffle")
def pixel_shuffle(x: Arg, upscale_factor: int) -> Rule:
    """Channels become blocks of pixels."""
    r = upscale_factor
    return _pixels(x, "... (c p q) h w -> ... c (h p) (w q)", r)


@rule("pixel_unshuffle")
def pixel_unshuffle(x: Arg, downscale_factor: int) -> Rule:
    """Blocks of pixels become channels."""
    return _pixels(x, "... c (h p) (w q) -> ... (c p q) h w", downscale_factor)


def _pixels(x: Arg, text: str, r: int) -> Rule:
    return notation(text, x, sizes={"p": r, "q": r}, whole="p q", linear=[[x]], moves=True, local=unless_empty)
