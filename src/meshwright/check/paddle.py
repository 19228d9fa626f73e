"""Scores our rules against what Paddle's answer, on the same model of bytes.

The model is that of :mod:`meshwright.cost`: on a ring, all-gather and reduce-scatter send (n-1)/n of the gathered
bytes, all-reduce twice that, all-to-all (n-1)/n of the local bytes; slicing, padding and zeroing send nothing.  Both
answers are priced by the same search for the cheapest conversions (:func:`meshwright.reshard.plan`), and of these only
the forward bytes count.  Elements are float32 (indices int64, masks bool), since cases do not say.  Replicated inputs
are given as *reduced* (each rank's gradient of them is its own contribution), and forward our rules are asked for
inputs that need no gradient: what the forward sends is the question; with gradients what is cheaper both ways wins.

*Forward*: an answer costs the conversions of the inputs as given to the layouts that the rule asks for.

*Backward*: an answer costs the conversions of the inputs as given to the inferred ones, plus those of the outputs
that running the op on these gives to the outputs wished.

Where two answers cost the same, their outputs decide: forward, those that need bytes to become the other's are the
worse; backward, those of which fewer wished shards are made by the op itself (the rest are cut from replicated
results, so work was not divided).  In both, a shard of a dim of size 1 is as good as a replica (there is nothing to
divide), and pending reductions are alike: which one is pending is arithmetic, not a choice of layouts.

The verdicts are those of :data:`VERDICTS`.  What would count for or against us is tried in numbers first
(:mod:`.sound`): an answer of Paddle's that beats ours, and one of ours that beats Paddle's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .. import api
from ..dispatch import Inference, infer
from ..layout import REPLICATE, Layout, Partial, Placement, Shard, Spec
from ..reshard import plan
from .cases import Case, CaseError, Entry, Given, flat
from .paddle_ops import builder
from .question import Call, Question, Result, Slot, fill, slots_in
from .sound import is_false

VERDICTS = {
    "agree": "neither moves data, and the outputs are the same",
    "freer": "we move less (backward also: as much, and divide more of the work)",
    "same cost": "as many bytes, and our outputs are no worse",
    "stricter": "we move more, or as much with worse outputs",
    "unsound": "Paddle moves less, but the op on the shards that it names does not give the outputs that it names",
    "error": "something was raised, or our own answer is false",
    "unsupported": "the op, or the op with these attributes, is no single rule of ours",
}
NEAR = 1e-6  # bytes


@dataclass(frozen=True)
class Answer:
    """Layouts asked of the inputs and made of the outputs, in Paddle's dims, and the bytes they cost."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    bytes: float


@dataclass(frozen=True)
class Score:
    """The verdict on a case, with both answers (None: there is none) and what there is to say."""

    case: Case
    verdict: str
    ours: Answer | None = None
    theirs: Answer | None = None
    note: str = ""


def score(case: Case) -> Score:
    """The verdict on one case; whatever a builder or a rule raises is a verdict too."""
    build = builder(case.op)
    if build is None:
        return Score(case, "unsupported", note=f"{case.op!r} is not in the table of ops")
    try:
        call = build(Question(case))
        if call is None:
            return Score(case, "unsupported", note="with these attributes it is no single op of ours")
        return _compared(case, call)
    except NoLayout as error:
        return Score(case, "unsound", note=str(error))
    except Exception as error:
        return Score(case, "error", note=f"{type(error).__name__}: {error}")


class NoLayout(CaseError):
    """What a rule of Paddle's answers is no layout of the tensor that it speaks of."""


def moved(src: Spec, dst: Spec) -> float:
    """Bytes that each rank sends for the conversion, forward."""
    return plan(src.with_(reduced=0, undecided=0), dst.with_(reduced=0, undecided=0)).forward_bytes


# ---------------------------------------------------------------------------------------------- two answers


def _compared(case: Case, call: Call) -> Score:
    slots = list(slots_in([call.args, call.kwargs]))
    given = [_given(case, slot) for slot in slots]
    results, wanted, found = _asked(case, call, iter([_viewed(g, s) for g, s in zip(given, slots, strict=True)]))
    made = [_in_their_dims(o, r) for o, r in zip(found.outputs, results, strict=True)]
    asked = [_unviewed(i, s, g) for i, s, g in zip(found.inputs, slots, given, strict=True)]
    asked_of_them = [g.with_(layout=_layout_of(case.result_inputs, s.index)) for g, s in zip(given, slots, strict=True)]
    expected = _outputs_of_theirs(case, call, slots, asked_of_them, made, results)

    def answer(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Answer:
        # A tensor that is shown several times is converted once.
        asked = {(s.index, to): moved(g, to) for s, g, to in zip(slots, given, inputs, strict=True)}
        cost = sum(asked.values())
        cost += sum(moved(o, o.with_(layout=w.layout)) for o, w in zip(outputs, wanted, strict=False))
        return Answer(tuple(i.layout for i in inputs), tuple(o.layout for o in outputs), cost)

    ours, theirs = answer(asked, made), answer(asked_of_them, expected)
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
        if is_false(call, views, expected, results):
            return Score(case, "unsound", ours, theirs, "the op on these shards does not give these outputs")
    if verdict == "freer" and found.native and is_false(call, found.inputs, made, results):
        return Score(case, "error", ours, theirs, "our answer is false: the op on our shards does not give our outputs")
    return Score(case, verdict, ours, theirs)


def _verdict(more: float, worse: float, agree: bool) -> str:
    """From the bytes that we move more than they, how much worse our outputs are, and whether all is the same."""
    more = worse if abs(more) < NEAR else more
    if abs(more) < NEAR:
        return "agree" if agree else "same cost"
    return "stricter" if more > 0 else "freer"


def _outputs_of_theirs(
    case: Case,
    call: Call,
    slots: Sequence[Slot],
    asked: Sequence[Spec],
    made: Sequence[Spec],
    results: Sequence[Result],
) -> list[Spec]:
    """What comes out on Paddle's side.

    A backward rule of Paddle's often repeats the wish.  What counts is what the op makes of the inputs that are asked
    for: our rule knows, where it can run on these as they are; where it cannot, Paddle's word stands.
    """
    if case.direction == "backward":
        views = [_viewed(a, s) for a, s in zip(asked, slots, strict=True)]
        if all(a is _unviewed(v, s, a) for a, v, s in zip(asked, views, slots, strict=True)):
            specs = iter(views)
            found = api.infer_forward(call.op, *fill(call.args, specs), **fill(call.kwargs, specs))
            if all(moved(v, i) < NEAR for v, i in zip(views, found.inputs, strict=True)):
                return [_in_their_dims(o, r) for o, r in zip(found.outputs, results, strict=True)]
    return [o.with_(layout=_expected(case, r, o)) for o, r in zip(made, results, strict=True)]


def _asked(case: Case, call: Call, specs: Iterator[Spec]) -> tuple[Sequence[Result], list[Spec], Inference]:
    """Which outputs are ours, the wishes for them (none forward), in Paddle's dims, and what our rule answers."""
    args, kwargs = fill(call.args, specs), fill(call.kwargs, specs)
    if case.direction == "forward":
        found = infer(call.op, args, kwargs, None, graded=False)  # the forward is the question
        return call.results or [Result(i) for i in range(len(found.outputs))], [], found
    results = call.results or [Result(i) for i in range(len(flat(case.outputs)))]
    wanted = [_tensor(flat(case.outputs), r.index) for r in results]
    wishes = [_wish(w, r) for w, r in zip(wanted, results, strict=True)]
    return results, wanted, api.infer_backward(call.op, *args, outputs=wishes, **kwargs)


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
    return spec.with_(layout=Layout(layout.mesh, sums, order=dict(layout.order)), reduced=0, undecided=0)


# ------------------------------------------------------------------------------- Paddle's dims and ours


def _tensor(entries: Sequence[Entry], index: int) -> Spec:
    entry = entries[index]
    if not isinstance(entry, Given) or entry.shape is None:
        raise CaseError(f"tensor {index} is {entry!r}")
    return Spec(entry.shape, torch.float32, entry.layout, reduced=(1 << entry.layout.mesh.ndim) - 1)


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
    shape = [1] * (max(to.values(), default=-1) + 1)  # dims of ours that Paddle's lacks have size 1
    for i, d in to.items():
        shape[d] = wanted.shape[i]
    return wanted.with_(shape=shape, layout=_renumbered(wanted.layout, to, len(shape)))


def _renumbered(layout: Layout, to: Mapping[int, int], ndim: int) -> Layout:
    """The layout of the same tensor with its dims renumbered; dims without a number have size 1 and become whole."""
    placements: list[Placement] = [
        (Shard(to[p.dim]) if p.dim in to else REPLICATE) if isinstance(p, Shard) else p for p in layout.placements
    ]
    order = {to[d]: axes for d, axes in layout.order if d in to}
    return Layout(layout.mesh, placements, order=order, ndim=ndim)
