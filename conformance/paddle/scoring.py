"""Scores our rules against what Paddle's answer, on the same model of bytes.

The model is that of :mod:`meshwright.resharding.cost`: on a ring, all-gather and reduce-scatter send (n-1)/n of the
gathered bytes, all-reduce twice that, all-to-all (n-1)/n of the local bytes; slicing, padding and zeroing send
nothing. Both answers are priced by the same search for the cheapest conversions
(:func:`meshwright.resharding.planner.plan`), and of these only the forward bytes count. Elements are float32 (indices
int64, masks bool), since cases do not say. Replicated inputs are given as *reduced* (each rank's gradient of them is
its own contribution), and forward our rules are asked for inputs that need no gradient: what the forward sends is the
question; with gradients what is cheaper both ways wins.

*Forward*: an answer costs the conversions of the inputs as given to the layouts that the rule asks for.

*Backward*: an answer costs the conversions of the inputs as given to the inferred ones, plus those of the outputs
that running the op on these gives to the outputs wished.

Where two answers cost the same, their outputs decide: forward, those that need bytes to become the other's are the
worse; backward, those of which fewer wished shards are made by the op itself (the rest are cut from replicated
results, so work was not divided). In both, a shard of a dim of size 1 is as good as a replica (there is nothing to
divide), and pending reductions are alike: which one is pending is arithmetic, not a choice of layouts.

The verdicts are those of :data:`VERDICTS`. What would count for or against us is tried in numbers first
(:mod:`.sound`): an answer of Paddle's that beats ours, and one of ours that beats Paddle's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.layout import REPLICATE, Layout, Partial, Placement, Shard, Spec
from meshwright.resharding.planner import plan
from meshwright.tensor import Inference, of_rule

from .cases import Case, CaseError, Entry, Given, flat
from .question import Call, Fresh, Made, Question, Result, Slot, Steps, fill, slots_in, slots_of
from .sound import tried
from .steps import builder

VERDICTS = {
    "agree": "neither moves data, and the outputs are the same",
    "freer": "we move less (backward also: as much, and divide more of the work)",
    "same cost": "as many bytes, and our outputs are no worse",
    "stricter": "we move more, or as much with worse outputs",
    "unsound": "Paddle moves less, but the op on the shards that it names does not give the outputs that it names",
    "error": "something was raised, or our own answer is false",
    "unsupported": "the op, or the op with these attributes, is none of ours",
}
# Why an answer that is stricter may be right all the same, worked out from the two answers; and what is a gap, by op.
REASONS = {
    "refused": "PyTorch's op runs on the whole and raises on the shards that Paddle names: nobody could run that",
    "owed": "we reduce now what is smaller than the pending sums that Paddle leaves: in all we send no more",
    "tie": "as many bytes; to make either's outputs from the other's costs as much",
    "gap": "Paddle's answer is better",
}
GAPS = {
    "cumsum": "of the flattened tensor: the view keeps its splits in an all-to-all, and the sum then wants it whole",
    "concat": "a pending sum is reduced, not scattered; two axes that split one dim share it, none moves away",
    "stack": "as for concat",
    "fused_rotary_position_embedding": "rows of sines picked by position: each of some ten ops chooses on its own",
    "matmul": "the split of a batch dim of size 1 suggests none for the dim that it broadcasts to",
    "scatter_nd_add": "of an index of one column the split is gathered, where it need only be sent on",
    "c_softmax_with_multi_label_cross_entropy": "the labels are used twice, in two layouts",
}
NEAR = 1e-6  # bytes
TRADES = "scaled_dot_product_attention"  # rows, so that ranks work alike: no matter of layouts


@dataclass(frozen=True)
class Answer:
    """Layouts asked of the inputs and made of the outputs, in Paddle's dims, and the bytes they cost."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    bytes: float


@dataclass(frozen=True)
class Score:
    """The verdict on a case, with both answers (None: there is none) and what there is to say.

    ``reason``: which of :data:`REASONS` it is stricter for.
    """

    case: Case
    verdict: str
    ours: Answer | None = None
    theirs: Answer | None = None
    note: str = ""
    reason: str = ""


def score(case: Case) -> Score:
    """The verdict on one case; whatever a builder or a rule raises is a verdict too."""
    build = builder(case.op)
    if build is None:
        return Score(case, "unsupported", note=f"{case.op!r} is not in the table of ops")
    try:
        call = build(Question(case))
        if call is None:
            return Score(case, "unsupported", note="with these attributes it is none of ours")
        return _compared(case, call)
    except NoLayout as error:
        return Score(case, "unsound", note=str(error))
    except Exception as error:
        return Score(case, "error", note=f"{type(error).__name__}: {error}")


class NoLayout(CaseError):
    """What a rule of Paddle's answers is no layout of the tensor that it speaks of."""


def _between(call: Call, sent: float) -> float:
    return 0.0 if call.op == TRADES else sent


def moved(src: Spec, dst: Spec) -> float:
    """Bytes that each rank sends for the conversion, forward."""
    return plan(src.invariant(), dst.invariant()).forward_bytes


# ---------------------------------------------------------------------------------------------- two answers


def _compared(case: Case, call: Call | Steps) -> Score:
    if isinstance(call, Steps) and case.direction == "backward":
        return Score(case, "unsupported", note="wishes are for the outputs of one op: this is several")
    if case.direction == "backward" and isinstance(call, Call) and not call.op:
        return Score(case, "unsupported", note="wishes for an op without a rule: ours has none to ask")
    slots = slots_of(call)
    given = [_given(case, slot) for slot in slots]
    views = [_viewed(g, s) for g, s in zip(given, slots, strict=True)]
    found = _run(call, slots, views) if isinstance(call, Steps) else _asked(case, call, views)
    results, wanted = found.results, found.wanted
    made = [_in_their_dims(o, r) for o, r in zip(found.outputs, results, strict=True)]
    asked = [_unviewed(i, s, g) for i, s, g in zip(found.inputs, slots, given, strict=True)]
    asked_of_them = [g.with_(layout=_layout_of(case.result_inputs, s.index)) for g, s in zip(given, slots, strict=True)]
    expected = _outputs_of_theirs(case, call, slots, asked_of_them, made, results)

    def answer(inputs: Sequence[Spec], outputs: Sequence[Spec], between: float) -> Answer:
        # A tensor that is shown several times is converted once.
        asked = {(s.index, to): moved(g, to) for s, g, to in zip(slots, given, inputs, strict=True)}
        cost = sum(asked.values()) + between
        cost += sum(moved(o, o.with_(layout=w.layout)) for o, w in zip(outputs, wanted, strict=False))
        return Answer(tuple(i.layout for i in inputs), tuple(o.layout for o in outputs), cost)

    ours, theirs = answer(asked, made, found.between), answer(asked_of_them, expected, 0.0)
    if wanted:
        worse = float(_not_made(made, wanted) - _not_made(expected, wanted))
        same = True
    else:
        plain = [(_plain(o), _plain(e)) for o, e in zip(made, expected, strict=True)]
        worse = sum(moved(o, e) for o, e in plain)
        same = all(o is e for o, e in plain)
    verdict = _verdict(ours.bytes - theirs.bytes, worse, same and ours.bytes < NEAR)
    if verdict == "stricter":
        views = [_viewed(a, s) for a, s in zip(asked_of_them, slots, strict=True)]
        outcome = tried(call, views, expected, results)
        if outcome == "false":
            return Score(case, "unsound", ours, theirs, "the op on these shards does not give these outputs")
        reason = "refused" if outcome == "refused" else _reason(ours, theirs, made, expected)
        note = GAPS.get(case.op, "") if reason == "gap" else REASONS[reason]
        return Score(case, verdict, ours, theirs, note, reason)
    if verdict == "freer" and found.native and tried(call, found.inputs, made, results) == "false":
        return Score(case, "error", ours, theirs, "our answer is false: the op on our shards does not give our outputs")
    return Score(case, verdict, ours, theirs)


def _verdict(more: float, worse: float, agree: bool) -> str:
    """From the bytes that we move more than they, how much worse our outputs are, and whether all is the same."""
    more = worse if abs(more) < NEAR else more
    if abs(more) < NEAR:
        return "agree" if agree else "same cost"
    return "stricter" if more > 0 else "freer"


def _reason(ours: Answer, theirs: Answer, made: Sequence[Spec], expected: Sequence[Spec]) -> str:
    def owed(outputs: Sequence[Spec]) -> float:
        return sum(moved(o, o.with_(layout=o.layout.without_partial())) for o in outputs)

    if ours.bytes + owed(made) <= theirs.bytes + owed(expected) + NEAR and owed(expected) > owed(made):
        return "owed"
    pairs = [(_plain(o), _plain(e)) for o, e in zip(made, expected, strict=True)]
    alike = sum(moved(e, o) - moved(o, e) for o, e in pairs) > -NEAR
    return "tie" if alike and abs(ours.bytes - theirs.bytes) < NEAR else "gap"


def _outputs_of_theirs(
    case: Case,
    call: Call | Steps,
    slots: Sequence[Slot],
    asked: Sequence[Spec],
    made: Sequence[Spec],
    results: Sequence[Result],
) -> list[Spec]:
    """What comes out on Paddle's side.

    A backward rule of Paddle's often repeats the wish.  What counts is what the op makes of the inputs that are asked
    for: our rule knows, where it can run on these as they are; where it cannot, Paddle's word stands.
    """
    if case.direction == "backward" and isinstance(call, Call):
        views = [_viewed(a, s) for a, s in zip(asked, slots, strict=True)]
        if all(a is _unviewed(v, s, a) for a, v, s in zip(asked, views, slots, strict=True)):
            specs = iter(views)
            found = of_rule(call.op, fill(call.args, specs), fill(call.kwargs, specs))
            if all(moved(v, i) < NEAR for v, i in zip(views, found.inputs, strict=True)):
                return [_in_their_dims(o, r) for o, r in zip(found.outputs, results, strict=True)]
    return [o.with_(layout=_expected(case, r, o)) for o, r in zip(made, results, strict=True)]


@dataclass(frozen=True)
class _Found:
    """What our rules answer: which outputs are which, and ``between``, the bytes of what is converted on the way
    or sent inside of an op."""

    results: Sequence[Result]
    inputs: Sequence[Spec]
    outputs: Sequence[Spec]
    wanted: Sequence[Spec] = ()
    native: bool = False
    between: float = 0.0


def _asked(case: Case, call: Call, views: Sequence[Spec]) -> _Found:
    """One call; ``wanted``: the wishes for outputs (none forward), in Paddle's dims."""
    specs = iter(views)
    args, kwargs = fill(call.args, specs), fill(call.kwargs, specs)
    if case.direction == "forward":
        found = _inferred(call.op, args, kwargs)
        results = call.results or [Result(i) for i in range(len(found.outputs))]
        return _Found(results, found.inputs, found.outputs, native=found.native, between=_between(call, found.sent))
    results = call.results or [Result(i) for i in range(len(flat(case.outputs)))]
    wanted = [_tensor(flat(case.outputs), r.index) for r in results]
    made = _inferred(call.op, args, kwargs).outputs
    wishes: list[Spec | None] = [
        _wish(w, r).with_(dtype=o.dtype) for w, r, o in zip(wanted, results, made, strict=False)
    ]
    wishes += [None] * (len(made) - len(wishes))
    found = of_rule(call.op, args, kwargs, wishes)
    return _Found(results, found.inputs, found.outputs, wanted, found.native, _between(call, found.sent))


def _inferred(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inference:
    """Forward, for inputs that need no gradient: the forward is the question."""
    if op:
        return of_rule(op, args, kwargs)
    whole = Layout(args[0][0].mesh)  # no rule
    inputs = tuple(s.with_(layout=whole, grad_partial_mask=0, undecided_mask=0) for s in args[0])
    outputs = tuple(Spec(n, args[0][0].dtype, whole) for n in kwargs["outputs"])
    return Inference(inputs, outputs, (), 0.0, True, "gathered")


def _run(steps: Steps, slots: Sequence[Slot], views: Sequence[Spec]) -> _Found:
    """A composition, call by call: a tensor is converted to a layout once, and a sum that was reduced stays known."""
    specs: dict[Any, Spec] = dict(zip(slots, views, strict=True))
    first: dict[Slot, Spec] = {}
    paid: dict[tuple[Any, Spec], float] = {}
    sent = 0.0
    for number, call in enumerate(steps.calls):
        operands = list(slots_in([call.args, call.kwargs]))
        for t in operands:
            if isinstance(t, Fresh):
                mesh = views[0].mesh
                specs[t] = Spec(t.shape, t.dtype, Layout(mesh), grad_partial_mask=(1 << mesh.ndim) - 1)
        given = iter([specs[t] for t in operands])
        found = _inferred(call.op, fill(call.args, given), fill(call.kwargs, given))
        sent += found.sent
        for t, to in zip(operands, found.inputs, strict=True):
            if isinstance(t, Slot) and t not in first:
                first[t] = to
            elif (t, to) not in paid:
                paid[t, to] = moved(specs[t], to)
            if specs[t].layout.partial and not to.layout.partial:
                specs[t] = to
        specs |= {
            Made(number, i): o.with_(grad_partial_mask=(1 << o.mesh.ndim) - 1) for i, o in enumerate(found.outputs)
        }
    inputs = [first.get(s, specs[s]) for s in slots]
    return _Found(
        [r for _, r in steps.results], inputs, [specs[m] for m, _ in steps.results], between=sum(paid.values()) + sent
    )


def _not_made(outputs: Sequence[Spec], wanted: Sequence[Spec]) -> int:
    """Of the shards that are wished, how many the op itself does not make."""
    return sum(
        isinstance(w, Shard) and o != w
        for out, want in zip(outputs, wanted, strict=True)
        for o, w in zip(_plain(out).layout.placements, _plain(want).layout.placements, strict=True)
    )


def _plain(spec: Spec) -> Spec:
    """Without what makes no difference: shards of dims of size 1, and which reduction is pending."""
    keep = {d: d for d, n in enumerate(spec.shape) if n != 1}
    layout = _renumbered(spec.layout, keep, spec.ndim)
    sums = [Partial() if isinstance(p, Partial) else p for p in layout.placements]
    return spec.with_(layout=Layout(layout.mesh, sums, order=dict(layout.order)), grad_partial_mask=0, undecided_mask=0)


# ------------------------------------------------------------------------------- Paddle's dims and ours


def _tensor(entries: Sequence[Entry], index: int) -> Spec:
    entry = entries[index]
    if not isinstance(entry, Given) or entry.shape is None:
        raise CaseError(f"tensor {index} is {entry!r}")
    return Spec(entry.shape, torch.float32, entry.layout, grad_partial_mask=(1 << entry.layout.mesh.ndim) - 1)


def _layout_of(entries: Sequence[Entry], index: int) -> Layout:
    entry = entries[index] if index < len(entries) else None
    if not isinstance(entry, Given):
        raise NoLayout(f"the result has no layout of tensor {index}")
    return entry.layout


def _given(case: Case, slot: Slot) -> Spec:
    return _tensor(flat(case.inputs), slot.index).with_(dtype=slot.dtype)


def _expected(case: Case, result: Result, ours: Spec) -> Layout:
    """The layout that Paddle says the output has."""
    layout = _layout_of(case.result_outputs, result.index)
    if layout.ndim == ours.ndim:
        return layout
    if math.prod(ours.shape) != 1:
        raise NoLayout(
            f"the result has a layout of {layout.ndim} dims for output {result.index}, which has {ours.ndim}"
        )
    return _renumbered(layout, {}, ours.ndim)  # a scalar, which one of both writes with dims


def _viewed(spec: Spec, slot: Slot) -> Spec:
    to = {theirs: ours for ours, theirs in enumerate(slot.dims) if theirs >= 0}
    return spec.with_(shape=slot.shape, layout=_renumbered(spec.layout, to, slot.ndim))


def _unviewed(spec: Spec, slot: Slot, given: Spec) -> Spec:
    to = {ours: theirs for ours, theirs in enumerate(slot.dims) if theirs >= 0}
    return given.with_(layout=_renumbered(spec.layout, to, given.ndim))


def _in_their_dims(ours: Spec, result: Result) -> Spec:
    if result.dims is None:
        return ours
    shape = [1 if d < 0 else ours.shape[d] for d in result.dims]
    to = {d: i for i, d in enumerate(result.dims)}
    return ours.with_(shape=shape, layout=_renumbered(ours.layout, to, len(shape)))


def _wish(wanted: Spec, result: Result) -> Spec:
    if result.dims is None:
        return wanted
    to = {i: d for i, d in enumerate(result.dims) if d >= 0}
    shape = [1] * max(result.ndim, max(to.values(), default=-1) + 1)  # dims of ours that Paddle's lacks have size 1
    for i, d in to.items():
        shape[d] = wanted.shape[i]
    return wanted.with_(shape=shape, layout=_renumbered(wanted.layout, to, len(shape)))


def _renumbered(layout: Layout, to: Mapping[int, int], ndim: int) -> Layout:
    """The layout of the same tensor with its dims renumbered; dims without a number have size 1 and become whole."""
    placements: list[Placement] = [
        (p.on(to[p.dim]) if p.dim in to else REPLICATE) if isinstance(p, Shard) else p for p in layout.placements
    ]
    order = {to[d]: axes for d, axes in layout.order if d in to}
    return Layout(layout.mesh, placements, order=order, ndim=ndim)
