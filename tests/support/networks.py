"""Random small networks as data: a program of tensor ops that runs on plain and on distributed tensors alike.

A :class:`Network` is a list of leaves and a list of calls, each naming the values that it reads by number.  ``run``
interprets it.  On one device the leaves are plain; on a mesh they are what their ``kind`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from tests.support.strategies import layouts, numbered

Tensor = torch.Tensor


@dataclass
class Leaf:
    """An input: its global value comes from shape and seed.  ``kind``: dist, plain, or partial (user-made)."""

    shape: tuple[int, ...]
    seed: int
    layout: mw.Layout | None
    grad: bool = True

    def value(self) -> Tensor:
        return numbered(self.shape, self.seed)

    def make(self, mesh: mw.Mesh | None) -> Tensor:
        if mesh is None or self.layout is None:
            return self.value().requires_grad_(self.grad)
        return mw.shard_tensor(self.value(), mesh, self.layout, check=False).requires_grad_(self.grad)


@dataclass
class Call:
    """One op: the name in :data:`OPS`, the values it reads, and its static arguments."""

    name: str
    reads: tuple[int, ...]
    static: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join([f'v{i}' for i in self.reads] + [repr(s) for s in self.static])})"


@dataclass
class Network:
    """Leaves, then calls; every value has a number.  The losses read some of them."""

    mesh: mw.Mesh
    leaves: list[Leaf] = field(default_factory=list)
    calls: list[Leaf | Call] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [f"mesh = {self.mesh!r}"]
        for i, c in enumerate(self.calls):
            lines.append(f"v{i} = {c!r}")
        lines.append(f"losses from {[f'v{i}' for i in self.outputs]}")
        return "\n".join(lines)


def _attention(x: Tensor) -> Tensor:
    return F.softmax(x @ x.mT, -1) @ x


def _inplace(x: Tensor) -> Tensor:
    """In-place linear ops on a fresh tensor (they keep every layout, Partial too)."""
    return (x * 1.0).mul_(0.5).neg_()


def _inplace_view(x: Tensor, d: int) -> Tensor:
    """Writing to a part writes to the whole."""
    z = x * 1.0
    z.narrow(d, 0, 1).mul_(3.0)
    return z


def _setitem(x: Tensor, d: int) -> Tensor:
    z = x.clone()
    z[(slice(None),) * d + (0,)] = 0.25
    return z


def _hooked(x: Tensor) -> Tensor:
    """A hook that changes the gradient."""
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda g: g * 2.0)
    return y


def _no_grad_scale(x: Tensor) -> Tensor:
    with torch.no_grad():
        s = (x * x).mean() + 1.0
    return x / s


def _split(x: Tensor, d: int) -> Tensor:
    """Three parts of one value, each used for itself: q, k and v."""
    q, k, v = x.chunk(3, d) if x.shape[d] % 3 == 0 else (x, x, x)
    return q * k.tanh() + v


def _embedding(w: Tensor, n: int) -> Tensor:
    return F.embedding(torch.arange(n * 2).reshape(n, 2) % w.shape[0], w)


def _cross_entropy(x: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(x, torch.arange(x.shape[0]) * 2 % x.shape[1], reduction=reduction)


def _checkpoint(x: Tensor, reentrant: bool) -> Tensor:
    # Reentrant checkpoints cannot be differentiated by autograd.grad, in plain PyTorch too.
    return checkpoint(lambda y: F.gelu(y) * y, x, use_reentrant=reentrant)


def _unshard(x: Tensor) -> Tensor:
    """Through a plain tensor with history, and (as a plain tensor) onwards."""
    return mw.unshard(x)


def _through_local(x: Tensor) -> Tensor:
    """Through local tensors and back."""
    if not isinstance(x, mw.DistTensor):
        return x
    return mw.from_local(x.to_local(), x.mesh, x.spec.layout, shape=x.shape, check=False)


@dataclass(frozen=True)
class Op:
    """``fn`` reads one value; ``needs`` says for which shapes it works, ``static`` draws its static arguments."""

    fn: Callable[..., Tensor]
    static: Callable[[tuple[int, ...]], list[st.SearchStrategy[Any]]] = lambda shape: []
    needs: Callable[[tuple[int, ...]], bool] = lambda shape: True


def _dim(shape: tuple[int, ...]) -> list[st.SearchStrategy[Any]]:
    return [st.integers(0, len(shape) - 1)]


def _dim_keep(shape: tuple[int, ...]) -> list[st.SearchStrategy[Any]]:
    return [*_dim(shape), st.booleans()]


def _splits(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes in which one dim is two."""
    return [
        (*shape[:d], *parts, *shape[d + 1 :])
        for d, n in enumerate(shape)
        for k in (2, 3)
        if n % k == 0 and n > k
        for parts in ((k, n // k), (n // k, k))
    ]


def _part(shape: tuple[int, ...]) -> list[st.SearchStrategy[Any]]:
    spans = [(d, lo, n) for d, size in enumerate(shape) for lo in range(size) for n in range(1, size - lo + 1)]
    return [st.sampled_from(spans)]


UNARY: dict[str, Op] = {
    "gelu": Op(F.gelu),
    "tanh": Op(torch.tanh),
    "neg": Op(torch.neg),
    "square": Op(lambda x: x * x),
    "affine": Op(lambda x, a: x * a + 0.5, lambda s: [st.sampled_from([2.0, -0.5])]),
    "total": Op(torch.sum),
    "mean_all": Op(torch.mean),
    "clone": Op(torch.clone),
    "detach_mix": Op(lambda x: x + x.detach()),
    "no_grad_scale": Op(_no_grad_scale),
    "inplace": Op(_inplace),
    "hooked": Op(_hooked),
    "unshard": Op(_unshard),
    "through_local": Op(_through_local),
    "checkpoint": Op(_checkpoint, lambda s: [st.just(False)]),
    "sum": Op(lambda x, d, keep: x.sum(d, keepdim=keep), _dim_keep, bool),
    "mean": Op(lambda x, d, keep: x.mean(d, keepdim=keep), _dim_keep, bool),
    "amax": Op(lambda x, d, keep: x.amax(d, keepdim=keep), _dim_keep, bool),
    "var": Op(lambda x, d, keep: x.var(d, keepdim=keep, correction=0), _dim_keep, bool),
    "logsumexp": Op(lambda x, d, keep: x.logsumexp(d, keepdim=keep), _dim_keep, bool),
    "softmax": Op(lambda x, d: F.softmax(x, d), _dim, bool),
    "log_softmax": Op(lambda x, d: F.log_softmax(x, d), _dim, bool),
    "cumsum": Op(torch.cumsum, _dim, bool),
    "flip": Op(lambda x, d: x.flip(d), _dim, bool),
    "setitem": Op(_setitem, _dim, bool),
    "inplace_view": Op(_inplace_view, _dim, bool),
    "split": Op(_split, _dim, bool),
    "root": Op(lambda x: (x * x).sum(-1, keepdim=True).add(1.0).sqrt(), needs=bool),
    "layer_norm": Op(lambda x: F.layer_norm(x, x.shape[-1:]), needs=lambda s: bool(s) and s[-1] > 2),
    "rms_norm": Op(lambda x: F.rms_norm(x, x.shape[-1:], eps=0.1), needs=bool),
    "transpose": Op(torch.transpose, lambda s: [*_dim(s), *_dim(s)], lambda s: len(s) > 1),
    "flatten": Op(lambda x, i: x.flatten(i, i + 1), lambda s: [st.integers(0, len(s) - 2)], lambda s: len(s) > 1),
    "view": Op(torch.reshape, lambda s: [st.sampled_from(_splits(s))], lambda s: bool(_splits(s)) and len(s) < 4),
    "unsqueeze": Op(torch.unsqueeze, lambda s: [st.integers(0, len(s))], lambda s: len(s) < 4),
    "narrow": Op(lambda x, part: x.narrow(*part), _part, bool),
    "select": Op(lambda x, d: x.select(d, -1), _dim, bool),
    "index": Op(lambda x, d: x.index_select(d, torch.arange(3) % x.shape[d]), _dim, bool),
    "expand": Op(lambda x, n: x.expand(n, *x.shape), lambda s: [st.sampled_from([2, 4])], lambda s: len(s) < 3),
    "attention": Op(_attention, needs=lambda s: len(s) > 1),
    "sdpa": Op(lambda x: F.scaled_dot_product_attention(x, x, x), needs=lambda s: len(s) > 2),
    "embedding": Op(_embedding, lambda s: [st.sampled_from([2, 4])], lambda s: len(s) == 2),
    "cross_entropy": Op(_cross_entropy, lambda s: [st.sampled_from(["mean", "sum", "none"])], lambda s: len(s) == 2),
    "mse": Op(lambda x: F.mse_loss(x, torch.zeros(x.shape, dtype=x.dtype))),
}

OPS: dict[str, Callable[..., Tensor]] = {
    **{name: op.fn for name, op in UNARY.items()},
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "maximum": torch.maximum,
    "matmul": torch.matmul,
    "linear": F.linear,
    "linear_bias": F.linear,
    "cat": lambda x, y, d: torch.cat([x, y], d),
    "stack": lambda x, y, d: torch.stack([x, y], d),
    "reshard": lambda x, layout: mw.reshard(x, layout) if isinstance(x, mw.DistTensor) else x,
}


def interpret(net: Network, mesh: mw.Mesh | None, leaves: list[Tensor] | None = None) -> list[Tensor]:
    """Values of all leaves and calls, on ``mesh`` or (None) on one device; ``leaves`` are used again if given."""
    values: list[Tensor] = []
    old = iter(leaves or ())
    for c in net.calls:
        if leaves and isinstance(c, Leaf):
            values.append(next(old))
            continue
        values.append(c.make(mesh) if isinstance(c, Leaf) else OPS[c.name](*[values[i] for i in c.reads], *c.static))
    return values


def losses(net: Network, values: list[Tensor]) -> list[Tensor]:
    """A scalar per output: a weighted sum, so that no two elements have the same cotangent."""
    return [(values[i] * numbered(values[i].shape, 50 + i)).sum() for i in net.outputs]


# ------------------------------------------------------------------------------------------ drawing networks


class Drawer:
    """Draws calls one by one, keeping the shapes of the values so far."""

    def __init__(self, data: st.DataObject, mesh: mw.Mesh, partial: bool = True) -> None:
        self.data, self.net, self.shapes = data, Network(mesh), []
        self.ops = ("sum",) if partial else ()

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def push(self, item: Leaf | Call, shape: tuple[int, ...]) -> int:
        self.net.calls.append(item)
        self.shapes.append(tuple(shape))
        return len(self.shapes) - 1

    def leaf(self, shape: tuple[int, ...]) -> int:
        """A fresh leaf, or (tied use) an old one of the same shape."""
        same = [i for i, c in enumerate(self.net.calls) if isinstance(c, Leaf) and c.shape == tuple(shape)]
        if same and self.draw(st.booleans()):
            return same[-1]
        kind = self.draw(st.sampled_from(["dist", "dist", "dist", "plain"]))
        layout = self.draw(layouts(self.net.mesh, len(shape), self.ops)) if kind == "dist" else None
        return self.push(Leaf(tuple(shape), len(self.shapes), layout), shape)

    def any_of(self, test: Callable[[tuple[int, ...]], bool]) -> int | None:
        found = [i for i, s in enumerate(self.shapes) if test(s)]
        return self.draw(st.sampled_from(found[::-1])) if found else None

    def step(self) -> bool:
        """One more op on values that exist, or on those and a new leaf; False where the op drawn cannot be."""
        name = self.draw(st.sampled_from(list(OPS)))
        x = self.draw(st.sampled_from(range(len(self.shapes) - 1, -1, -1)))
        shape = self.shapes[x]
        made: Call | None
        if name in UNARY:
            op = UNARY[name]
            made = Call(name, (x,), tuple(self.draw(s) for s in op.static(shape))) if op.needs(shape) else None
        elif name in ("cat", "stack"):
            made = self._join(name, x, shape)
        elif name in ("matmul", "linear", "linear_bias", "reshard"):
            made = getattr(self, f"_{name}")(x, shape)
        else:
            made = self._binary(name, x, shape)
        if made is None:
            return False
        reads = [torch.empty(self.shapes[i], dtype=torch.float64) for i in made.reads]
        out = reads[0] if made.name == "reshard" else OPS[made.name](*reads, *made.static)
        self.push(made, tuple(out.shape))
        return True

    def _other(self, x: int, shape: tuple[int, ...]) -> int | None:
        """A value that broadcasts with x: an old one, or a new leaf of x's shape or of its last dim."""
        kind = self.draw(st.sampled_from(["old", "new", "row"]))
        if kind == "old":
            return self.any_of(lambda s: s == shape or s == shape[1:] or s == ())
        return self.leaf(shape if kind == "new" else shape[-1:])

    def _binary(self, name: str, x: int, shape: tuple[int, ...]) -> Call | None:
        y = self._other(x, shape)
        return None if y is None else Call(name, (x, y) if self.draw(st.booleans()) else (y, x))

    def _join(self, name: str, x: int, shape: tuple[int, ...]) -> Call | None:
        y = self.any_of(lambda s: s == shape)
        ends = len(shape) - (name == "cat")
        if y is None or ends < 0 or len(shape) > 3:
            return None
        return Call(name, (x, y), (self.draw(st.integers(0, ends)),))

    def _matmul(self, x: int, shape: tuple[int, ...]) -> Call | None:
        if len(shape) < 1:
            return None
        if self.draw(st.booleans()):
            y = self.any_of(lambda s: len(s) >= 2 and len(s) <= 3 and s[-2] == shape[-1] and len(shape) >= 2
                            and (len(s) == 2 or len(shape) == 2 or s[:-2] == shape[:-2]))  # fmt: skip
            if y is not None:
                return Call("matmul", (x, y))
        return Call("matmul", (x, self.leaf((shape[-1], self.draw(st.sampled_from([3, 4, 6]))))))

    def _linear(self, x: int, shape: tuple[int, ...]) -> Call | None:
        if not shape:
            return None
        return Call("linear", (x, self.leaf((self.draw(st.sampled_from([3, 4, 6])), shape[-1]))))

    def _linear_bias(self, x: int, shape: tuple[int, ...]) -> Call | None:
        if not shape:
            return None
        n = self.draw(st.sampled_from([3, 4, 6]))
        return Call("linear_bias", (x, self.leaf((n, shape[-1])), self.leaf((n,))))

    def _reshard(self, x: int, shape: tuple[int, ...]) -> Call | None:
        return Call("reshard", (x,), (self.draw(layouts(self.net.mesh, len(shape), self.ops)),))


def draw_network(data: st.DataObject, mesh: mw.Mesh, max_calls: int = 8) -> Network:
    """A random network on ``mesh``: one to three starting leaves, then calls, then some values for the loss."""
    d = Drawer(data, mesh)
    for _ in range(data.draw(st.integers(1, 2))):
        d.leaf(tuple(data.draw(st.lists(st.sampled_from([4, 3, 6, 1, 5, 2]), min_size=1, max_size=3))))
    for _ in range(data.draw(st.sampled_from(range(1, max_calls + 1)))):
        _ = d.step() or d.step() or d.step()
    last = len(d.shapes) - 1
    more = data.draw(st.lists(st.integers(0, last), max_size=2, unique=True))
    d.net.outputs = [last, *[i for i in more if i != last]]
    return d.net
