"""Lines that a random program may have, by families: templates with holes, each filled from the values at hand.

Holes: ``{x}`` a floating value (``{x1}``: of at least one dim, ...), which the holes after it refer to; ``{d}`` one of
its dims; ``{y}`` what broadcasts with it; ``{same}`` of its shape; ``{k}`` a bool; ``{s}`` a number; ``{ix}`` an index;
``{m}`` a mask of its shape; ``{shape}`` another shape of as many elements; ``{like ...}`` a value of the shape of an
expression.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.layout import Layout, Partial, Placement, Replicate, Shard
from meshwright.mesh import Mesh

Tensor = torch.Tensor

# A source that is the target is not drawn: masked_scatter_ reads it while it writes, and PyTorch does not say what.
# Nor is a write by ``.data`` to a value with a history: which outputs an op kept for its backward is its own affair.
FAMILIES: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "{new} = {x}.tanh()", "{new} = torch.sigmoid({x})", "{new} = -{x}", "{new} = {x} * {s}", "{new} = {x} + {s}",
        "{new} = F.gelu({x})", "{new} = {x}.relu()", "{new} = {x}.abs() + 0.5", "{new} = ({x} * {x} + 0.5).sqrt()",
        "{new} = {x}.clamp(-0.5, 0.75)", "{new} = F.silu({x})", "{new} = ({x} * {x} + 1).log()", "{new} = {s} - {x}",
        "{new} = torch.exp({x} * 0.25)", "{new} = {x} ** 2", "{new} = {x} / {s}", "{new} = F.softplus({x})",
        "{new} = {x}.detach() * {x}", "{new} = {x}.clone()", "{new} = {x}.to(torch.float32).to(torch.float64)",
        "{new} = torch.nan_to_num({x})", "{new} = {x}.sin() + {x}.cos()", "{new} = torch.zeros_like({x}) + {x}",
        "{new} = torch.ones_like({x}) * {s}", "{new} = F.leaky_relu({x}, 0.1)", "{new} = {x}.sign() * {x}",
    ),
    "binary": (
        "{new} = {x} + {y}", "{new} = {x} * {y}", "{new} = {x} - {y}", "{new} = {x} / ({y} * {y} + 1)",
        "{new} = torch.add({x}, {y}, alpha=2)", "{new} = torch.maximum({x}, {same})",
        "{new} = torch.minimum({x}, {y})", "{new} = {x}.where({m}, {same})",
        "{new} = torch.where({x} > {y}, {x}, {y})", "{new} = torch.lerp({x}, {same}, 0.25)",
        "{new} = {x}.masked_fill({m}, {s})", "{new} = {x}.masked_fill({m}, 0)",
        "{new} = torch.addcmul({x}, {same}, {same}, value=0.5)",
        "{new} = torch.addcdiv({x}, {same}, {same} ** 2 + 1, value=0.5)", "{new} = torch.hypot({x} + 3, {y})",
        "{new} = ({x} > {y}).double() * {x}", "{new} = {x} * ({y} > 0)", "{new} = {x} + {y} * {s}",
        "{new} = {y} - {x}",
    ),
    "reduce": (
        "{new} = {x1}.sum({d}, keepdim={k})", "{new} = {x1}.mean({d}, keepdim={k})", "{new} = {x}.sum()",
        "{new} = {x}.mean()", "{new} = {x1}.amax({d}, keepdim={k})", "{new} = {x1}.amin({d})",
        "{new} = {x1}.var({d}, keepdim={k})", "{new} = {x1}.logsumexp({d})", "{new} = {x1}.norm(dim={d})",
        "{new} = torch.linalg.vector_norm({x} + 2)", "{new} = {x1}.max({d}).values", "{new} = {x1}.prod({d})",
        "{new} = {x1}.std({d}, correction=0)", "{new} = {x2}.sum(({d}, {e}))",
        "{new} = {x2}.amax(({d}, {e}), keepdim={k})", "{new} = {x1}.cumsum({d})", "{new} = {x1}.median({d}).values",
        "{new} = ({x1} > 0).any({d}).double()", "{new} = ({x1} > -2).all({d}).double()", "{new} = {x1}.max()",
        "{new} = {x1}.argmax({d}).double()", "{new} = {x1}.cumprod({d})", "{new} = torch.nansum({x1}, {d})",
        "{new} = torch.count_nonzero({x1}, {d}).double()", "{new} = {x1}.sort({d}).values",
        "{new} = {x1}.topk(1, {d}).values", "{new} = {x1}.min({d}, {k}).values",
    ),
    "matmul": (
        "{new} = {x2} @ {right}", "{new} = F.linear({x1}, {weight})", "{new} = torch.matmul({x2}, {right})",
        "{new} = {x2} @ {x2}.mT", "{new} = {x2}.mT @ {x2}", "{new} = torch.einsum('...i,...i->...', {x1}, {same})",
        "{new} = {x1} @ {vector}", "{new} = torch.tensordot({x2}, {same}, dims=([{d}], [{d}]))",
        "{new} = torch.outer({x}.flatten(), {x}.flatten())",
        "{new} = torch.einsum('...ij,...kj->...ik', {x2}, {same})",
    ),
    "standardise": (  # reduced, and joined with what it was reduced of: a conversion of what has no type yet
        "{new} = {x1} - {x1}.mean({d}, keepdim=True)", "{new} = ({x1} - {x1}.mean({d}, keepdim=True)) * {same}",
        "{new} = {x1} / (({x1} * {x1}).sum({d}, keepdim=True) + 1).sqrt()", "{new} = {x1}.softmax({d}) * {same}",
        "{new} = F.batch_norm({x2}, None, None, training=True)", "{new} = {x1}.mean({d}, keepdim=True) * {x1} + {same}",
        "{new} = ({x2} - {x2}.mean(0)) @ {x2}.mT", "{new} = {same} * (1 + {x1}.sum({d}, keepdim=True).tanh())",
    ),
    "view": (
        "{new} = {x}.reshape({shape})", "{new} = {x1}.flatten()", "{new} = {x1}.unsqueeze({d})",
        "{new} = {x1}.squeeze({d})", "{new} = {x2}.transpose({d}, {e})", "{new} = {x2}.mT",
        "{new} = {x}.permute({perm})", "{new} = {x}.expand(2, {sizes}) * 1", "{new} = {x1}.flip({d})",
        "{new} = {x1}.roll(1, {d})", "{new} = {x}[None]", "{new} = {x2}.flatten({d0}, {d0} + 1)",
        "{new} = {x1}.repeat_interleave(2, {d})", "{new} = {x2}.diagonal()", "{new} = {x1}.movedim({d}, 0)",
        "{new} = {x1}.unflatten({d}, ({factor}, -1))", "{new} = {x}.repeat({twos})", "{new} = torch.tril({x2})",
        "{new} = F.pad({x1}, (1, 2))", "{new} = {x1}.contiguous().view(-1)", "{new} = {x1}.unfold({d}, 1, 1)",
    ),
    "join": (
        "{new} = torch.cat([{x1}, {same}], {d})", "{new} = torch.stack([{x}, {same}])",
        "{new}, {new} = {x1}.tensor_split(2, {d})", "{new} = torch.cat([{x1}, {x1}, {same}], {d})",
        "{new}, {new} = torch.split({x1}, [{half}], {d})", "{new} = torch.stack([{x1}, {same}], {d})",
        "{new}, {new} = ({x1}[:{mid}], {x1}[{mid}:])", "{new} = {x1}.chunk(2, {d})[0]", "{new} = {x1}.unbind({d})[0]",
    ),
    "index": (
        "{new} = {x1}[{ix}]", "{new} = {x1}[{ix}]", "{new} = {x1}.select({d}, 0)",
        "{new} = {x1}.narrow({d}, 0, {half0})", "{new} = {x1}.index_select({d}, {indices})",
        "{new} = {x1}.gather({d}, {gather})", "{new} = torch.take_along_dim({x1}, {gather}, {d})",
        "{new} = {x1}[{m}]", "{new} = torch.masked_select({x1}, {m})", "{new} = {x1}.take({flat})",
        "{new} = F.embedding({rows}, {x2x})", "{new} = {x1}[{rowmask}]", "{new} = {x1}.scatter({d}, {gather}, {s})",
        "{new} = {x1}.index_add({d}, {perm1}, {same})", "{new} = {x1}.index_fill({d}, {indices}, {s})",
        "{new} = {x1}.scatter_add({d}, {scattered}, {same})", "{new} = {x1}.index_copy({d}, {perm1}, {same})",
        "{new} = torch.select_scatter({x1}, {like {x1}.select({d}, 0)}, {d}, 0)",
        "{new} = torch.slice_scatter({x1}, {like {x1}.narrow({d}, 0, {half0})}, {d}, 0, {half0})",
        "{new} = {x1}.scatter_reduce({d}, {scattered}, {same}, 'amax')",
        "{new} = {x1}.index_put(({head},), {like {x1}[{head}]}, accumulate=True)",
        "{new} = torch.diagonal_scatter({x2}, {like {x2}.diagonal()})",
    ),
    "nn": (
        "{new} = F.softmax({x1}, {d})", "{new} = F.log_softmax({x1}, {d})",
        "{new} = F.layer_norm({x1}, {x}.shape[-1:])", "{new} = F.rms_norm({x1}, {x}.shape[-1:], eps=0.1)",
        "{new} = F.cross_entropy({x2x}, {classes})", "{new} = F.cross_entropy({x2x}, {classes}, reduction='none')",
        "{new} = F.mse_loss({x}, {same})", "{new} = F.scaled_dot_product_attention({x3}, {same}, {same})",
        "{new} = F.normalize({x1}, dim={d})", "{new} = F.l1_loss({x}, {same}, reduction='sum')",
        "{new} = F.nll_loss({x2x}, {classes}, reduction='sum')",
        "{new} = checkpoint(lambda t: F.gelu(t) * t, {x}, use_reentrant=False)",
        "{new} = F.glu(torch.cat([{x1}, {same}], {d}), {d})", "{new} = F.huber_loss({x}, {same})",
        "{new} = F.binary_cross_entropy_with_logits({x}, {same}.sigmoid())",
        "{new} = F.cosine_similarity({x1}, {same} + 2, {d})",
        "{new} = F.kl_div({x1}.log_softmax({d}), {same}.softmax({d}), reduction='batchmean')",
    ),
    "write": (
        "{w} *= 2", "{w}.add_({y})", "{w}.mul_({s})", "{w1}[{ix}] = {s}", "{w1}[{ix}] = {like {w1}[{ix}]}",
        "{w1}[{ix}] += {s}", "{w1}[{ix}] *= {s}", "{w1}[{m}] = {s}", "{w1}[{m}] = {like {w1}[{m}]}",
        "{w1}[{m}] += {s}", "{w1}[{rowmask}] = {same}[{rowmask}]", "{w}.copy_({same})", "{w}.zero_()",
        "{w}.masked_fill_({m}, {s})", "{w1}.index_add_({d}, {perm1}, {same})", "{w1}.scatter_({d}, {gather}, {s})",
        "{w1}.index_copy_({d}, {perm1}, {same})", "{w1}.select({d}, 0).add_({s})",
        "{w1}.narrow({d}, 0, {half0}).mul_({s})", "{w1}.chunk(2, {d})[0].mul_({s})", "{w2}.mT.add_({s})",
        "{w2}.diagonal().mul_({s})", "{w}.clamp_(min=-0.5)", "{w}.tanh_()",
        "{w1}.index_put_(({head},), {like {w1}[{head}]})",
        "{w1}.index_put_(({head},), {like {w1}[{head}]}, accumulate=True)",
        "{w1}.t().mul_(2) if {w}.dim() < 3 else None", "{w1}.masked_scatter_({m}, {same} * 1)",
        "{w1}.index_fill_({d}, {indices}, {s})", "{w1}.cumsum_({d})", "{w1}[0].copy_({like {w1}[0]})",
        "torch.add({w}, {same}, out={w})", "torch.mul({same}, {s}, out={w})", "{w}.view(-1)[0:1].add_({s})",
        "{w}.data.mul_({s}) if not {w}.requires_grad else None", "{w1}.scatter_add_({d}, {scattered}, {same})",
        "{new} = {w1}[{ix}]; {w}.mul_({s})",
        "{new} = {w1}.narrow({d}, 0, {half0}); {new0}.add_({s})",
        "{new} = {w1}.unbind({d})[0]; {new0}.mul_({s}); {w}.add_({s})",
    ),
    "layout": (
        "{new} = reshard({x}, {layout})", "{new} = reshard({x}, {layout})", "{new} = unshard({x})",
        "{new} = reshard({x}, {layout}) * {x}", "{new} = {x} + reshard({x} * 2, {layout}) * {y}",
        "{new} = {x}.detach().requires_grad_() * {s}",
    ),
    "control": (
        "{new} = {x} / (1 + {x}.detach().abs().max())", "{new} = {x} * ({x}.sum().item() > 0)",
        "{new} = {x} * float({x}.numel())", "{new} = {x} * {x}.shape[-1] if {x}.dim() else {x} * 2",
        "{new} = {x}.type_as({y})",
    ),
}  # fmt: skip
WEIGHTS = {
    "pointwise": 4, "binary": 5, "reduce": 5, "matmul": 4, "view": 5, "join": 3, "index": 5, "nn": 4, "write": 6,
    "layout": 4, "control": 1, "standardise": 3,
}  # fmt: skip


class Unfit(Exception):
    """A template whose holes cannot be filled from the values at hand."""


def random_layout(rng: random.Random, mesh: Mesh, shape: tuple[int, ...], partial: tuple[str, ...] = ()) -> Layout:
    """A layout of a tensor of ``shape``; with ``partial`` one of these reductions may occur, the same on every axis."""
    op = rng.choice(partial) if partial else None
    choices: list[Placement] = [Replicate(), Replicate(), *[Shard(d) for d in range(len(shape)) for _ in range(2)]]
    choices += [Partial(op)] if op else []
    given = [rng.choice(choices) for _ in mesh.axes]
    order = {}
    for d in range(len(shape)):
        axes = [a for a, p in enumerate(given) if p == Shard(d)]
        if len(axes) > 1:
            order[d] = rng.sample(axes, len(axes))
    return Layout(mesh, given, order=order, ndim=len(shape))


def layout_text(layout: Layout, comma: str = ", ") -> str:
    """A layout as two arguments: placements by axis, and order."""
    placed = dict(zip(layout.mesh.axes, layout.placements, strict=True))
    inner = ", ".join(f"{a!r}: {'R' if isinstance(p, Replicate) else repr(p)}" for a, p in placed.items())
    return f"{{{inner}}}{comma}{dict(layout.order) or None}"


class Filler:
    """Fills the holes of one template."""

    def __init__(self, rng: random.Random, mesh: Mesh, env: Mapping[str, Any], values: Mapping[str, Tensor],
                 writable: set[str], number: int, static: bool) -> None:  # fmt: skip
        self.rng, self.mesh, self.env, self.values = rng, mesh, env, values
        self.writable, self.number, self.static = writable, number, static
        self.main: Tensor | None = None
        self.bound: dict[str, str] = {}
        self.made: list[str] = []
        self.written: str | None = None

    def fill(self, template: str) -> str:
        """The template as a line.  Raises Unfit."""
        while True:
            hole = re.search(r"\{([a-z0-9]+)( [^{}]*)?\}", template)
            if hole is None:
                return template.replace("«", "{").replace("»", "}")
            text = self.hole(hole.group(1), (hole.group(2) or "").strip())
            template = template[: hole.start()] + text.replace("{", "«").replace("}", "»") + template[hole.end() :]

    def hole(self, name: str, inside: str) -> str:
        """Text for one hole."""
        if name == "new":
            self.made.append(f"v{self.number + len(self.made)}")
            return self.made[-1]
        if name == "like":
            return self._like(inside)
        if re.fullmatch(r"[xw]\d?x?", name):
            return self._main(name)
        keep = name in (
            "ix",
            "m",
            "d",
            "gather",
            "head",
            "half0",
            "d0",
            "rowmask",
            "mid",
        )  # twice in a template: the same
        if keep and name in self.bound:
            return self.bound[name]
        text = _HOLES[name](self)
        if keep:
            self.bound[name] = text
        return text

    # -- values ---------------------------------------------------------------------------------------

    @property
    def x(self) -> Tensor:
        """The value that the holes refer to."""
        if self.main is None:
            raise Unfit
        return self.main

    def _main(self, name: str) -> str:
        kind = name[0]
        if kind in self.bound:
            return self.bound[kind]
        least = int(name[1]) if len(name) > 1 else 0
        exact = name.endswith("2x")
        fits = [
            n for n, t in self.values.items()
            if t.is_floating_point() and t.dim() >= least and (not exact or t.dim() == 2) and t.numel() < 2000
            and (kind != "w" or n in self.writable)
        ]  # fmt: skip
        if not fits:
            raise Unfit
        # Late values more often: chains rather than a bush.
        chosen = self.rng.choices(fits, [1 + i for i in range(len(fits))])[0]
        self.main, self.bound[kind] = self.values[chosen], chosen
        if kind == "w":
            self.written = chosen
        self.bound["new0"] = f"v{self.number}"
        return chosen

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """A new value, plain or in a random layout."""
        seed = self.rng.randrange(100)
        typed = "" if dtype is torch.float64 else f", dtype={dtype}"
        return f"vals({tuple(shape)}, {seed}{self.laid(shape)}{typed})"

    def laid(self, shape: tuple[int, ...]) -> str:
        """``, layout`` of a new value, or nothing: a plain tensor, as often in a step that is captured."""
        if self.static or self.rng.random() < 0.25:
            return ""
        return f", ({layout_text(random_layout(self.rng, self.mesh, tuple(shape)))})"

    def shaped(self, shape: tuple[int, ...]) -> str:
        """A value of this shape: one at hand, or a new one."""
        fits = [n for n, t in self.values.items() if tuple(t.shape) == tuple(shape) and t.dtype is self.x.dtype]
        if fits and self.rng.random() < 0.6:
            return self.rng.choice(fits)
        return self.fresh(shape, self.x.dtype)

    def _like(self, expression: str) -> str:
        text = expression.replace("«", "{").replace("»", "}")
        try:
            with torch.no_grad():
                found = eval(text, dict(self.env))  # our own text
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise Unfit from error
        shape = tuple(found.shape)
        if shape and self.rng.random() < 0.2:
            shape = shape[1:]
        return self.shaped(shape)

    def dim(self) -> int:
        """One of the dims, counted from the end at times."""
        n = self.x.dim()
        if not n:
            raise Unfit
        d = self.rng.randrange(n)
        return d if self.rng.random() < 0.7 else d - n

    def size(self) -> int:
        """Length of the dim that ``{d}`` named."""
        return self.x.shape[int(self.hole("d", ""))]


def _broadcasts(f: Filler) -> str:
    shape = list(f.x.shape)
    if f.rng.random() < 0.5:
        shape = [n if f.rng.random() < 0.6 else 1 for n in shape][f.rng.randrange(len(shape) + 1) if shape else 0 :]
    return f.shaped(tuple(shape))


def _index(f: Filler) -> str:
    parts, ellipsis = [], False
    for n in f.x.shape[: f.rng.randint(1, f.x.dim())] if f.x.dim() else ():
        kind = f.rng.choice(("int", "slice", "slice", "all", "list", "step", "tensor", "none", "dots", "mask"))
        if kind == "int" and n:
            parts.append(str(f.rng.randrange(-n, n)))
        elif kind == "slice":
            parts.append(f"{f.rng.randint(0, n)}:{f.rng.randint(-1, n + 1)}")
        elif kind == "step":
            parts.append(f"{f.rng.randint(0, 1)}::2")
        elif kind == "list" and n:
            parts.append(repr(f.rng.sample(range(n), min(n, f.rng.randint(1, 2)))))
        elif kind == "tensor" and n:
            size = f.rng.randint(1, n)
            parts.append(f"distinct({size}, {n}, {f.rng.randrange(9)}{f.laid((size,))})")
        elif kind == "mask":
            parts.append(f"mask(({n},), {f.rng.randrange(9)}{f.laid((n,))})")
        elif kind == "none":
            parts += ["None", ":"]
        elif kind == "dots" and not ellipsis:
            parts.append("...")
            ellipsis = True
            break
        else:
            parts.append(":")
    return ", ".join(parts) or "..."


def _permutation(f: Filler) -> str:
    return repr(f.rng.sample(range(f.x.dim()), f.x.dim()))


def _other_shape(f: Filler) -> str:
    n = f.x.numel()
    if not n:
        return repr((0, *[s for s in f.x.shape if s])[: f.x.dim() or 1])
    divisors = [k for k in range(1, n + 1) if n % k == 0]
    a = f.rng.choice(divisors)
    rest = n // a
    b = f.rng.choice([k for k in divisors if rest % k == 0])
    return repr(f.rng.choice([(a, rest), (a, b, rest // b), (-1,), (a, -1), (n,)]))


def _other_dim(f: Filler) -> str:
    n = f.x.dim()
    if n < 2:
        raise Unfit
    used = int(f.hole("d", "")) % n
    return str(f.rng.choice([i for i in range(n) if i != used]))


def _indices(f: Filler) -> str:
    n = f.size()
    if not n:
        raise Unfit
    size = f.rng.randint(1, 4)
    return f"ints(({size},), {n}, {f.rng.randrange(9)}{f.laid((size,))})"


def _gather_index(f: Filler) -> str:
    d = int(f.hole("d", "")) % f.x.dim()
    shape = [n if i != d else f.rng.randint(1, 2) for i, n in enumerate(f.x.shape)]
    if not f.x.shape[d]:
        raise Unfit
    # At most as many as there are, so that no place is written twice: which one wins is not defined.
    shape[d] = 1
    return f"ints({tuple(shape)}, {f.x.shape[d]}, {f.rng.randrange(9)}{f.laid(tuple(shape))})"


def _scatter_index(f: Filler) -> str:
    if not f.size():
        raise Unfit
    return f"ints({tuple(f.x.shape)}, {f.size()}, {f.rng.randrange(9)}{f.laid(tuple(f.x.shape))})"


def _rows_of_table(f: Filler) -> str:
    fits = [t.shape[0] for t in f.values.values() if t.dim() == 2 and t.shape[0]]
    if not fits:
        raise Unfit
    shape = (f.rng.randint(1, 4), 2)
    return f"ints({shape}, {min(fits)}, {f.rng.randrange(9)}{f.laid(shape)})"


def _classes(f: Filler) -> str:
    n, c = f.x.shape
    if not c:
        raise Unfit
    return f"ints(({n},), {c}, {f.rng.randrange(9)}{f.laid((n,))})"


def _at_least(n: int, low: int) -> int:
    if n < low:
        raise Unfit
    return n


def _split_at(f: Filler) -> str:
    n = _at_least(f.size(), 1)
    cut = f.rng.randint(0, n)
    return f"{cut}, {n - cut}"


def _factor(f: Filler) -> str:
    n = _at_least(f.size(), 1)
    return str(f.rng.choice([k for k in range(1, n + 1) if n % k == 0]))


def _fresh_mask(f: Filler, shape: Sequence[int]) -> str:
    return f"mask({tuple(shape)}, {f.rng.randrange(9)}{f.laid(tuple(shape))})"


def _mask(f: Filler) -> str:
    main = f.bound.get("x") or f.bound["w"]
    return f"({main} > 0)" if f.rng.random() < 0.5 else _fresh_mask(f, f.x.shape)


def _distinct(f: Filler, n: int) -> str:
    return f"distinct({n}, {n}, {f.rng.randrange(9)}{f.laid((n,))})"


def _layout(f: Filler) -> str:
    partial = ("sum", "avg") if f.rng.random() < 0.4 else ()
    return layout_text(random_layout(f.rng, f.mesh, tuple(f.x.shape), partial))


_HOLES: dict[str, Callable[[Filler], str]] = {
    "y": _broadcasts,
    "same": lambda f: f.shaped(tuple(f.x.shape)),
    "d": lambda f: str(f.dim()),
    "d0": lambda f: str(f.rng.randrange(_at_least(f.x.dim(), 2) - 1)),
    "e": _other_dim,
    "k": lambda f: str(f.rng.random() < 0.5),
    "s": lambda f: str(f.rng.choice([2.0, -0.5, 0.75, 0.0, 1.0, 3])),
    "ix": _index,
    "m": _mask,
    "rowmask": lambda f: _fresh_mask(f, f.x.shape[:1]),
    "shape": _other_shape,
    "perm": _permutation,
    "sizes": lambda f: ", ".join(map(str, f.x.shape)) or "1",
    "twos": lambda f: ", ".join(str(f.rng.randint(1, 2)) for _ in range(max(f.x.dim(), 1))),
    "right": lambda f: f.shaped((*f.x.shape[:-2], f.x.shape[-1], f.rng.randint(1, 5))),
    "weight": lambda f: f.fresh((f.rng.randint(1, 5), f.x.shape[-1]), f.x.dtype),
    "vector": lambda f: f.shaped((f.x.shape[-1],)),
    "half": _split_at,
    "half0": lambda f: str(f.rng.randint(0, f.size())),
    "mid": lambda f: str(f.rng.randint(0, f.x.shape[0])),
    "factor": _factor,
    "indices": _indices,
    "gather": _gather_index,
    "scattered": _scatter_index,
    "perm1": lambda f: _distinct(f, f.size()),
    "flat": lambda f: f"ints((3,), {_at_least(f.x.numel(), 1)}, {f.rng.randrange(9)}{f.laid((3,))})",
    "head": lambda f: _distinct(f, _at_least(f.x.shape[0], 1)),
    "rows": _rows_of_table,
    "classes": _classes,
    "layout": _layout,
    "new0": lambda f: f.made[0],
}  # fmt: skip
