"""Mixture of experts: each token is computed by the few experts that a router chose for it, as one op.

Rows are sorted by expert inside of the op, and each rank computes those of its experts: counts and orders are values,
which no layout knows.  What a rank's experts do not compute is zero, so the output is Partial over the experts, and the
op brings it at once to where its tokens lie.  Products group by group are what Megablocks (Gale et al., 2022,
arXiv 2211.15841) and torch's ``grouped_mm`` do: no token is dropped, whatever the load of an expert.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from ..errors import DispatchError, near
from ..layout import Shard
from ..operators import GIVEN, internal, opaque_operator, operator
from ..ranks import runtime
from .expert_kernels import DERIVATIVES, ExpertRows
from .factor_notation import APPLIES_TO, IMPLEMENTATIONS, Arg, Local, LocalFn, Rule, composite, notation, rule
from .strategies import Strategy, nested_bounds
from .users_function import on_parts

Tensor = torch.Tensor
F: Any = nn.functional
Act = str | Callable[[Tensor], Tensor]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: Act = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute a mixture of experts: the weighted sum of each token's experts.

    Expert `e` computes `down[e] @ (act(gate) * up)`, where `gate` and `up` are the halves of `gate_up[e] @ x`. Without
    a gate it computes `down[e] @ act(gate_up[e] @ x)`; `gate_up` then has as many rows as `down` has columns. With
    sharded experts, `{"*.experts.*": {"ep": mw.Shard(0)}}`, each rank computes its own (expert parallelism).

    Args:
        x: Tokens, (..., c).
        ids: Experts of each token, (..., k), integers. Ids of no expert contribute nothing.
        weights: Weight of each, (..., k).
        gate_up: (experts, 2 m, c), or (experts, m, c) without a gate. With separate halves: (experts, 2, m, c) or
            (experts, 1, m, c), so that `m` can be sharded too: `mw.Shard(2)`, also of `down`.
        down: (experts, c, m).
        act: Name of an elementwise function in `torch.nn.functional`. Or a function without parameters, the same object
            in every call: of each element of the gate, (r, m) to (r, m); with fused halves of all products, (r, 2 m) to
            (r, m).
        gate_up_bias: (experts, 2 m) or (experts, 2, m), as `gate_up`.
        down_bias: (experts, c).

    Returns:
        (..., c), with dtype and layout of `x`.

    Raises:
        DispatchError: If shapes do not fit, or `act` cannot be used.

    Examples:
        ```python
        x, router = torch.randn(10, 4), nn.Linear(4, 3)
        gate_up, down = torch.randn(3, 2 * 8, 4), torch.randn(3, 4, 8)
        weights, ids = router(x).softmax(-1).topk(2)
        assert mw.experts(x, ids, weights, gate_up, down).shape == (10, 4)
        ```
    """
    each = isinstance(act, str) or gate_up.ndim == 4
    parts = _checked(x, ids, weights, gate_up, down, each, gate_up_bias, down_bias)
    if gate_up.ndim == 3:
        gate_up = gate_up.unflatten(1, parts)
        gate_up_bias = None if gate_up_bias is None else gate_up_bias.unflatten(1, parts)
    made: Tensor = _WHOLE(x, ids, weights, gate_up, down, gate_up_bias, down_bias, _named(act), each)
    return made


def _checked(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, each: bool, *biases: Tensor | None
) -> tuple[int, int]:
    """Of how many parts the rows of ``gate_up`` are, and their size: if ``each`` column is for itself, the width."""
    parts, rows = (1, -1), tuple(gate_up.shape[1:-1])
    if gate_up.ndim == 4:
        parts = rows[0], rows[1]
    elif gate_up.ndim == down.ndim == 3:
        halves = 2 if each and rows[0] == 2 * down.shape[2] else 1
        parts = halves, rows[0] // halves
    fits = down.ndim == 3 and len(gate_up) == len(down) and gate_up.shape[-1] == x.shape[-1] == down.shape[1]
    fits = fits and (not each or (parts[0] in (1, 2) and parts[1] == down.shape[2]))
    fits = fits and ids.shape == weights.shape and ids.shape[:-1] == x.shape[:-1] and ids.shape[-1] > 0
    fits = fits and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not fits:
        raise DispatchError(
            f"experts: x {tuple(x.shape)}, ids {tuple(ids.shape)} of {ids.dtype}, weights {tuple(weights.shape)}, "
            f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} do not fit: give x (..., c), ids (whole "
            "numbers) and weights (..., k), gate_up (experts, 2 m or m, c) or (experts, 2 or 1, m, c), down "
            "(experts, c, m)"
        )
    for name, bias, size in zip(("gate_up_bias", "down_bias"), biases, (rows, x.shape[-1:]), strict=True):
        if bias is not None and bias.shape != (len(down), *size):
            wanted = ", ".join(map(str, (len(down), *size)))
            raise DispatchError(f"experts: {name} is {tuple(bias.shape)}, ({wanted}) was expected")
    return parts


def _on_one(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, *rest: Any) -> Tensor:
    return _run((0, len(gate_up)), x, ids, weights, gate_up, *rest)


_WHOLE = opaque_operator(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, str act, bool each) -> Tensor",
    _on_one,
)


@composite("meshwright::experts")
def _composed(x: Tensor, *rest: Any) -> Tensor:
    # Left Partial, the residual stream would stay so, and be reduced whole by the next op that is not linear.
    return laid_as(expert_outputs(x, *rest), x)


@internal
def expert_outputs(x: Tensor, *rest: Any) -> Tensor:
    """What the experts of this rank make of the tokens."""
    return _on_one(x, *rest)


@rule("expert_outputs")
def _outputs_rule(
    x: Arg, ids: Arg, weights: Arg, gate_up: Arg, down: Arg, gate_up_bias: Arg | None, down_bias: Arg | None, act: str,
    each: bool,
) -> Rule:  # fmt: skip
    """Tokens are free; experts are added up, so each rank may compute its own, or a part of the width of each."""

    def local(ctx: Local) -> LocalFn:
        return _by_rows(ctx, ids.shape[-1]) or partial(_run, ctx.bounds("e"))

    n = "m" if each else "n"
    inputs = {x: "... c", ids: "... k", weights: "... k", gate_up: f"e g {n} c", down: "e c m"}
    inputs |= {t: letters for t, letters in ((gate_up_bias, f"e g {n}"), (down_bias, "e c")) if t is not None}
    linear = [weights, [down, down_bias]]
    whole = "c k g" if each else "c k g n m"
    reduced = "e m" if each else "e"
    return notation(
        inputs, "... c", whole=whole, reduced=reduced, linear=linear, heavy=True, local=local,
        joint=tuple(_joint(x, ids, weights, gate_up, down, *filter(None, (gate_up_bias, down_bias)))),
    )  # fmt: skip


@internal
def laid_as(y: Tensor, x: Tensor) -> Tensor:
    """``y`` where ``x`` lies; of ``x`` only the layout counts."""
    return y.view_as(y)


@rule("laid_as")
def _laid_rule(y: Arg, x: Arg) -> Rule:
    # Heavy: it stays split where x is, though to reduce it whole may send as much.
    return notation({y: y.letters, x: y.letters}, y.letters, lends=[x], heavy=True)


# ---------------------------------------------------------------------------------------------- rows

IMPLEMENTATIONS["experts"] = ("rows", "whole")
APPLIES_TO["experts"] = "both tokens and experts"


def fraction(count: int, held: int, k: int) -> float:
    """Of how many tokens a rank that holds so many experts needs the row, if each goes to ``k`` of all evenly."""
    return 1 - math.comb(count - held, k) / max(math.comb(count, k), 1)


def _joint(x: Arg, ids: Arg, weights: Arg, gate_up: Arg, down: Arg, *biases: Arg) -> Iterator[tuple[int, Strategy]]:
    """The axes that split tokens and experts, and over which each row goes only to the ranks that compute it.

    Where that sends fewer bytes than to gather all tokens, or the experts: the forward decides, as the backward sends
    the same again in each case.
    """
    tokens, held = (x, ids, weights), (gate_up, down, *biases)
    specs = [t.spec for t in (*tokens, *held) if t.spec is not None]
    if len(specs) < len(tokens) + len(held) or 0 in x.shape or gate_up.shape[0] == 1:  # one expert is not divided
        return
    mesh, requested_strategy = specs[0].mesh, runtime.RT.strategies.get("experts", {})
    by_token = [s.layout.dim_axes() for s in specs[:3]]
    by_expert = specs[3].layout.dim_axes().get(0, ())
    if any(list(axes) != sorted(axes) for cuts in (*by_token, {0: by_expert}) for axes in cuts.values()):
        return
    count, k, parts = gate_up.shape[0], ids.shape[-1], math.prod(mesh.sizes[a] for a in by_expert)
    need = fraction(count, -(-count // max(parts, 1)), k)
    rows = math.prod(x.shape[:-1]) / math.prod(mesh.sizes[a] for axes in by_token[0].values() for a in axes)
    for a, (axis, n) in enumerate(zip(mesh.axes, mesh.sizes, strict=True)):
        placed = [s.layout.placements[a] for s in specs]
        split = isinstance(placed[0], Shard) and placed[0].dim < x.ndim - 1 and placed[1:3] == [placed[0]] * 2
        if n == 1 or not split or placed[3:] != [Shard(0)] * len(held):
            continue
        runtime.RT.met.add(("experts", axis))
        if requested_strategy.get(axis) == "whole":
            continue
        each = 2 * x.shape[-1] * x.dtype.itemsize + k * weights.dtype.itemsize
        sent, all_rows = (n - 1) * rows * need * each, (n - 1) * rows * each
        weights_sent = (n - 1) / n * sum(s.nbytes / (parts / n) for s in specs[3:])
        if requested_strategy.get(axis) == "rows" or sent < min(all_rows, weights_sent):
            inputs = (placed[0],) * 3 + (Shard(0),) * len(held)
            yield a, Strategy(inputs, (placed[0],), "e")


def _by_rows(ctx: Local, k: int) -> LocalFn | None:
    """The op where tokens and experts are split over the same axes; None where they are not."""
    mesh, placed = ctx.inputs[0].mesh, [ctx.inputs[i].layout.placements for i in (0, 3)]
    axes = tuple(a for a, (p, q) in enumerate(zip(*placed, strict=True)) if isinstance(p, Shard) and q == Shard(0))
    if not axes:
        return None
    count, over = ctx.rule.sizes["e"], ctx.axes("e")
    places = [mesh.coordinate(r) for r in mesh.group_ranks(mesh.rank_at(ctx.here), axes)]
    bounds = [nested_bounds(count, mesh, over, place) for place in places]
    sizes = tuple(math.prod(ctx.inputs[0].local_shape(place)[:-1]) for place in places)
    need, n = fraction(count, max(stop - start for start, stop in bounds), k), len(places)
    why = (
        f"each row goes once to each of {n} ranks that has one of its experts: to {need * (n - 1):.2f} of the {n - 1} "
        f"others where experts are chosen evenly, and at most all {sum(sizes)} rows come to a rank"
    )
    rows = ctx.comm.route_rows(axes, sizes, why)
    starts, stops = [start for start, _ in bounds], [stop for _, stop in bounds]

    def run(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        chosen = rows.all(ids.reshape(-1, k))
        wanted = _WANTED(chosen, starts, stops)
        tokens, scores = rows.gather(wanted, x.reshape(-1, x.shape[-1]), weights.reshape(-1, k))
        return rows.scatter(_run(ctx.bounds("e"), tokens, chosen, scores, *rest), wanted).view(x.shape)

    return run


def _wanted(ids: Tensor, starts: list[int], stops: list[int]) -> Tensor:
    """Of each rank, that has these experts, the tokens for which one of them is chosen: (ranks, tokens)."""
    parts = [((ids >= start) & (ids < stop)).any(-1) for start, stop in zip(starts, stops, strict=True)]
    return torch.stack(parts)


_WANTED = operator(
    "wanted_rows(Tensor ids, int[] starts, int[] stops) -> Tensor", _wanted,
    lambda ids, starts, stops: ids.new_empty((len(starts), ids.shape[0]), dtype=torch.bool),
)  # fmt: skip


def _run(
    own: tuple[int, int], x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, each: bool,
) -> Tensor:  # fmt: skip
    """What the experts ``own`` (start and stop) make of the tokens: of the others nothing is computed."""
    count, k, tokens = own[1] - own[0], ids.shape[-1], x.reshape(-1, x.shape[-1])
    kind, low = x.device.type, gate_up.dtype
    if kind != "meta" and low is not torch.float64 and torch.is_autocast_enabled(kind):  # which leaves float64 alone
        low = torch.get_autocast_dtype(kind)
    expert = ids.reshape(-1) - own[0]
    away = (expert < 0) | (expert >= count)
    # Rows of others come last; the products leave them zero.
    expert, order = expert.masked_fill(away, count).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(count, device=x.device, dtype=expert.dtype), right=True)

    biases = [None if t is None else t.flatten(1).to(low) for t in (gate_up_bias, down_bias)]
    kept = (weights.reshape(-1, k), gate_up.flatten(1, 2).to(low), down.to(low), *biases)
    # Aliases: what is given are distributed tensors again when the backward runs.
    given: list[Any] = [None if t is None else t.view_as(t) for t in (tokens.to(low), order, ends, *kept)]
    parts = gate_up.shape[1] if each else 0
    if each and act in DERIVATIVES:
        made: Tensor = ExpertRows.apply(_dense, act, parts, *given)
    else:
        made = _dense(*(*given, act, parts))
    return made.to(x.dtype).view(x.shape)


def _dense(
    tokens: Tensor, order: Tensor, ends: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, parts: int,
) -> Tensor:  # fmt: skip
    """The same of ops that have gradients, and of any function: all rows, those of other ranks' experts as zeros."""
    k, slots = weights.shape[1], torch.arange(order.shape[0], device=order.device)
    expert = torch.searchsorted(ends, slots, right=True)

    def product(rows: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        made: Tensor = _Grouped.apply(rows, w.transpose(-1, -2), ends)
        return made if bias is None else made + F.pad(bias, (0, 0, 0, 1)).index_select(0, expert)

    rows = product(tokens.index_select(0, order // k), gate_up, gate_up_bias)
    rows = product(_acted(rows, act, down.shape[-1], parts), down, down_bias)
    rows = rows.index_select(0, order.argsort()).unflatten(0, (len(tokens), k))
    return (rows * weights.unsqueeze(-1)).sum(1)


# ---------------------------------------------------------------------------------------------- loads


def expert_load(ids: Tensor, experts: int) -> Tensor:
    """Count the tokens that each expert computes, over all ranks.

    Use it for logs, and for routers that balance by a bias. In a captured step, return it from `loss_fn`.

    Args:
        ids: Expert of each token, integers of any shape. Ids outside 0 to `experts - 1` are not counted.
        experts: Number of experts.

    Returns:
        (experts,), int64.

    Examples:
        ```python
        assert mw.expert_load(torch.tensor([0, 2, 2, -1]), 3).tolist() == [1, 0, 2]
        ```
    """
    if ids.is_floating_point() or experts < 1:
        raise DispatchError(
            f"expert_load: ids of {ids.dtype} and experts={experts} were given; give whole numbers, and at least 1"
        )
    made: Tensor = _LOAD(ids, experts)
    return made


def _load(ids: Tensor, experts: int) -> Tensor:
    flat = ids.reshape(-1).long()
    counted = ((flat >= 0) & (flat < experts)).long()
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add(
        0, flat.clamp(0, experts - 1), counted
    )


_LOAD = opaque_operator("expert_load(Tensor ids, int experts) -> Tensor", _load)


@rule("meshwright::expert_load")
def _load_rule(ids: Arg, experts: int) -> Rule:
    """Each rank counts its own tokens."""
    return notation({ids: ids.letters}, "e", sizes={"e": experts}, whole="e", reduced=ids.letters)


# ---------------------------------------------------------------------------------------------- activations

# Names of functions of each element alone: what they make of a part of the columns is a part of what they make.
_EACH = (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish",
    "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanh", "tanhshrink",
)  # fmt: skip
# What stands for a function in the arguments of an op, and in keys of plans: a text.
_NAMES: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()
_FUNCTIONS: dict[str, Callable[[], Any]] = {}  # those of modules live as long as these


def _identity(act: Any) -> tuple[Any, Any]:
    """What a function is known by: a lambda of a forward, made at each call, by its code, where it holds nothing."""
    if isinstance(act, FunctionType) and not (
        act.__closure__ or act.__defaults__ or act.__kwdefaults__ or act.__dict__
    ):
        return act.__code__, id(act.__globals__)
    return getattr(act, "__self__", act), getattr(act, "__func__", None)


def _named(act: Act) -> str:
    if isinstance(act, str):
        if act not in _EACH:
            has = "no such function of each element" if hasattr(F, act) else "no"
            raise DispatchError(f"experts: torch.nn.functional has {has} {act!r}{near(act, _EACH)}, or give a function")
        return act
    if not callable(act):
        raise DispatchError(f"experts: act is {act!r}: give a name of torch.nn.functional, or a function")
    owner, part = _identity(act)
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
        raise DispatchError(f"experts: act {type(act).__name__} has parameters, which it must not: apply it yourself")
    names = _NAMES.setdefault(owner, {})
    if part not in names:
        kept: Callable[[], Any] = lambda: act  # noqa: E731
        if isinstance(owner, nn.Module):
            kept = weakref.ref(act) if part is None else weakref.WeakMethod(act)
        names[part] = f"{getattr(act, '__qualname__', type(act).__qualname__)}#{len(_FUNCTIONS)}"
        _FUNCTIONS[names[part]] = kept
    if not torch.compiler.is_exporting():
        return names[part]
    # What ranks capture is compared, and how many functions a rank has seen before is its own affair.
    if names[part] not in GIVEN.made:
        GIVEN.made.append(names[part])
    return f"@{GIVEN.made.index(names[part])}"


def _acted(rows: Tensor, act: str, width: int, parts: int) -> Tensor:
    """What a function of each column makes of rows in one or two ``parts``; or one of whole rows, where these are 0."""
    name = GIVEN.made[int(act[1:])] if act.startswith("@") else act
    fix = "multiply what experts gives, or give it as a part of their weights"
    fn = _FUNCTIONS[name]() if name in _FUNCTIONS else getattr(F, act)
    gate, *up = rows.chunk(2, -1) if parts == 2 else (rows,)
    made = on_parts(fn, (gate,), "experts: act", fix)
    made = made * up[0] if up else made
    if made.shape != (len(rows), width):
        raise DispatchError(f"experts: act gave {tuple(made.shape)} of {tuple(rows.shape)}; width {width} was expected")
    return made


# ---------------------------------------------------------------------------------------------- products by group


class _Grouped(torch.autograd.Function):
    """Sorted rows, each times the matrix of its group, of which ``ends`` says where it ends; rows after the last: 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        made: Tensor = _GROUPED(x, w, ends)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, ends = ctx.saved_tensors
        return _Grouped.apply(grad, w.transpose(-1, -2), ends), _Outer.apply(x, grad, ends), None


class _Outer(torch.autograd.Function):
    """Of each group the sum of the outer products of its rows; of a group without rows zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, ends)
        made: Tensor = _OUTER(x, y, ends)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y, ends = ctx.saved_tensors
        return _Grouped.apply(y, grad.transpose(-1, -2), ends), _Grouped.apply(x, grad, ends), None


def _grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    made, start = x.new_empty(len(x), w.shape[-1]), 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], w[group], out=made[start:end])
        start = end
    made[start:].zero_()
    return made


def _outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    made, start = x.new_empty(len(ends), x.shape[-1], y.shape[-1]), 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].t(), y[start:end], out=made[group])
        start = end
    return made


_GROUPED = operator(
    "grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor", _grouped,
    lambda x, w, ends: x.new_empty(x.shape[0], w.shape[-1]),
)  # fmt: skip
_OUTER = operator(
    "grouped_outer(Tensor x, Tensor y, Tensor ends) -> Tensor", _outer,
    lambda x, y, ends: x.new_empty(ends.shape[0], x.shape[-1], y.shape[-1]),
)  # fmt: skip
