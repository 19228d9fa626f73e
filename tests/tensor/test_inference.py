"""Inference says what eager code does: of every op of the book, in every layout of its arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.dispatch import function_named, plans
from meshwright.errors import MeshwrightError, RuleError
from meshwright.rules import COMPOSITES, RULES
from meshwright.rules.book import _CALLS
from tests.support.compare import S0, S1, P, R

PAIR = mw.Mesh({"x": 2})
# Calls with all that PyTorch wants, where a rule can do with less.
WHOLE_CALLS = """
f(4,6), 0.5, True | dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ native_dropout
f(4,6), 0.5, True | feature_alpha_dropout feature_alpha_dropout_
f(4,6), 0.5 | geometric_
f(4,6), (6,4), (4,1) | _reshape_alias
f(4,6), f(4,6), True, False, 1e-8, 1 | poisson_nll_loss
c(4,6) | _conj
f(4,6), [0], False | frobenius_norm
"""
# Calls of what is computed as other ops, as the book has them for rules.
COMPOSED = """
f(4,6), f(4,6) | type_as view_as reshape_as dist
f(4,6), i(4,1), 1 | take_along_dim
f(4,6), f(4,6), f(4,6) | F.gaussian_nll_loss
f(4,6), [1.0] | new_tensor
f(2,6,2,3), f(2,6,2,3), f(2,6,2,4), f(2,6,2), f(2,6,2), 2 | meshwright::gated_delta_rule
f(2,4,6,3), f(2,2,6,3), f(2,2,6,3), None, False, True, 2, 0.0, None | meshwright::attention
f(4,6), f(8,6), i(4) | F.linear_cross_entropy meshwright::linear_cross_entropy
f(4,1), f(4,6) | broadcast_tensors
f(4), f(6) | meshgrid
f(4,6) | atleast_1d atleast_2d atleast_3d tril_ triu_ diagonal_copy squeeze_copy t_copy nanmean norm
f(4,6) | unbind_copy
f(4,1), (4,6) | expand_copy
f(4,6), 1, 2, 4 | narrow_copy
f(4,6), (1,0) | permute_copy
f(4,6), 1, 0 | select_copy
f(4,6), 2, 1 | split_copy
f(4,6), (2,4), 1 | split_with_sizes_copy
f(4,6), 0, 1 | transpose_copy
f(4,6), 1, 2, 2 | unfold_copy
f(4,6), 1 | unsqueeze_copy
f(4,6), (6,4) | view_copy
f(4,2) | view_as_complex_copy
c(4,6) | view_as_real_copy
[f(4,6), f(4,6)] | hstack vstack row_stack dstack column_stack
f(4,3), f(4,3) | cross
[f(4,6), f(6,8)] | linalg_multi_dot
f(4,6), f(6,8) | chain_matmul
f(4,6), 1, i(4,3), f(4,3) | scatter_ scatter_add_
f(4,6), 1, i(4,3), f(4,3), 'sum' | scatter_reduce_
f(4,6), 0, i(5), f(5,6) | index_add_ index_copy_
f(4,6), 0, i(5), 0.0 | index_fill_
f(4,6), [i(5)], f(5,6) | index_put_
f(4,6), f(4,6) | resize_as_ resize_as
f(4,6), (4,6) | resize_ resize
"""
LINES = [line.partition(" | ") for line in (WHOLE_CALLS + COMPOSED).splitlines()]
CALLS = _CALLS | {op: call for call, _, ops in LINES for op in ops.split()}
# Lists of tensors, of which each goes its own way; no op; of an accelerator; of names alone; a check of values.
UNASKED = {n for n in COMPOSITES if "foreach" in n}
UNASKED |= {"_has_compatible_shallow_copy_type", "cuda", "pin_memory", "_to_copy", "linalg_solve_triangular"}
UNASKED |= {n for n in COMPOSITES if n.startswith("as_strided")}  # of memory, of which a spec says nothing
UNASKED |= {"checked_documents", "associative_scan_rows", "meshwright::associative_scan"}  # of a function


class Made:
    """Stands in place of a tensor of the example of a call."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        n = torch.Size(shape).numel()
        value = torch.arange(n) % 2 if dtype == torch.int64 else (torch.arange(n) + 1) / (n + 2)
        self.value = value.reshape(shape).to(dtype)
        self.layouts: list[Any] = [R, *map(mw.Shard, range(len(shape)))]
        if dtype.is_floating_point:
            self.layouts.append(P)


def arguments(name: str) -> tuple[Any, ...]:
    kinds = {"f": torch.float64, "i": torch.int64, "b": torch.bool, "c": torch.complex128}
    makers = {k: (lambda *shape, dtype=dtype: Made(dtype, shape)) for k, dtype in kinds.items()}
    found: tuple[Any, ...] = eval(f"({CALLS[name]},)", {"torch": torch, "slice": slice, **makers})
    return found


def tensors(a: Any) -> list[Made]:
    return [a] if isinstance(a, Made) else [t for x in a for t in tensors(x)] if isinstance(a, (list, tuple)) else []


def filled(a: Any, values: Iterator[Any]) -> Any:
    if isinstance(a, Made):
        return next(values)
    return type(a)(filled(x, values) for x in a) if isinstance(a, (list, tuple)) else a


def grid(given: list[Made]) -> Iterator[tuple[Any, ...]]:
    """Each tensor in each of its layouts beside others that are replicated, and all in the same one."""
    found = {(p,) * len(given): None for p in given[0].layouts if all(p in t.layouts for t in given)}
    for i, t in enumerate(given):
        found |= {(R,) * i + (p,) + (R,) * (len(given) - i - 1): None for p in t.layouts}
    yield from found


def eager(name: str, call: tuple[Any, ...], placements: tuple[Any, ...], graded: bool = True) -> Any:
    """Specs of what is given on a simulated rank and layouts of what the call gives, or the error."""
    given = tensors(call)

    def run() -> Any:
        made = []
        for t, p in zip(given, placements, strict=True):
            x = mw.shard_tensor(t.value, PAIR, p if isinstance(p, tuple) else [p], check=False)
            if graded and (t.value.dtype.is_floating_point or t.value.dtype.is_complex):
                x.requires_grad_()  # inference prices gradients
            made.append(x * 1 if graded and (name.endswith("_") or name == "setitem") else x)
        specs = [x.spec for x in made]
        try:
            out = function_named(name)(*filled(call, iter(made)))
        except MeshwrightError as error:
            return specs, error
        if name == "setitem":
            out = made[0]
        out = out if isinstance(out, (list, tuple)) else [out]
        return specs, [t.spec.layout if isinstance(t, mw.DistTensor) else mw.Layout(PAIR) for t in out]

    try:
        return mw.simulate(run, PAIR)[0]
    except RuntimeError:  # an argument that has no gradient
        if not graded:
            raise
        return eager(name, call, placements, graded=False)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", sorted({*RULES, *COMPOSITES} - UNASKED))
def test_inference_says_what_eager_does(name):
    call = arguments(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for placements in grid(tensors(call)):
            specs, want = eager(name, call, placements)
            plain = [mw.Spec(s.shape, s.dtype, s.layout) for s in specs]
            if isinstance(want, MeshwrightError):
                with pytest.raises(type(want)):
                    mw.infer_forward(name, *filled(call, iter(plain)))
                continue
            found = mw.infer_forward(name, *filled(call, iter(plain)))
            assert [s.layout for s in found.outputs] == want, placements


PAIRS = mw.Mesh({"a": 2, "b": 2})
# Calls whose answer for leaves differed while a spec without types was taken for that of a value of decided type.
OF_LEAVES = {
    "lerp": ((P, P), (S0, P), (R, S1)),
    "scatter": ((S1, S0), (R, S1), (R, R)),
    "add": ((S0, R), (R, S1)),
    "addcmul": ((P, S0), (S1, R), (R, R)),
    "mul": ((R, S1), (S0, R)),
    "matmul": ((S0, R), (R, P)),
    "where": ((R, S0), (S1, S0), (R, P)),
    "baddbmm": ((R, R), (S0, S1), (R, S0)),
}


@pytest.mark.parametrize("name", OF_LEAVES)
def test_a_spec_without_types_is_of_a_leaf(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes: which dims they share is decided by bytes, those of gradients among them."""
    monkeypatch.setattr(f"{__name__}.PAIR", PAIRS)
    call, layouts = arguments(name), OF_LEAVES[name]
    for given in (layouts, tuple(p[::-1] for p in layouts)):
        specs, want = eager(name, call, given)
        found = mw.infer_forward(name, *filled(call, (mw.Spec(s.shape, s.dtype, s.layout) for s in specs)))
        assert [s.layout for s in found.outputs] == want, given


def test_a_gradient_that_is_reduced_at_its_leaf_is_counted() -> None:
    """Each rank uses the weight for its own rows: 8 * 6 numbers of 4 bytes, half of them sent twice."""
    x, w = (mw.Spec(s, torch.float32, mw.Layout(PAIR, [p])) for s, p in (((4, 6), S0), ((8, 6), R)))
    found = mw.infer_forward("linear", x, w)
    assert found.bytes == 8 * 6 * 4
    assert found.outputs[0].layout.placements == (S0,)
    # A value of a type is asked about as what it is.
    assert mw.infer_forward("linear", x, w.with_(grad_partial_mask=1)).bytes == 0


@pytest.mark.parametrize(
    "name", ["mse_loss", "kl_div", "nll_loss", "cross_entropy", "F.huber_loss", "cross_entropy_loss"]
)
def test_losses_have_the_defaults_of_their_names(name):
    """ATen's ops and PyTorch's functions reduce; bindings of C, whose default is a name, take that for 0."""
    x = mw.Spec((4, 6), torch.float64, mw.Layout(PAIR, [S0]))
    y = mw.Spec((4,), torch.int64, mw.Layout(PAIR, [S0])) if "nll" in name or "cross" in name else x
    assert mw.infer_forward(name, x, y).outputs[0].layout.placements == (P,)
    assert (
        mw.infer_forward(name, x, y, reduction="none" if name in ("cross_entropy", "F.huber_loss") else 0)
        .outputs[0]
        .shape
        == y.shape
    )


def test_a_binding_of_c_without_its_default_is_not_reduced():
    x = torch.rand(4, 6, dtype=torch.float64)

    def run():
        given = mw.shard_tensor(x, PAIR, [S0])
        return [mw.unshard(fn(given, given)) for fn in (torch.kl_div, torch.binary_cross_entropy_with_logits)]

    want = [torch.kl_div(x, x), torch.binary_cross_entropy_with_logits(x, x)]
    for got in mw.simulate(run, PAIR):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def spec(shape: tuple[int, ...], *placements: Any, dtype: torch.dtype = torch.float32) -> mw.Spec:
    return mw.Spec(shape, dtype, mw.Layout(PAIR, placements, ndim=len(shape)))


X = spec((4, 6), R)
REFUSED = {
    "keywords": (lambda: mw.infer_forward("matmul", X, spec((6, 8), R), transpose_y=True, foo=3), "unexpected keyword"),
    "too many": (lambda: mw.infer_forward("matmul", X, spec((6, 8), R), 1, 2), "takes 2 positional arguments"),
    "of an elementwise op": (lambda: mw.infer_forward("gelu", X, nope=1), "unexpected keyword argument 'nope'"),
    "sizes": (lambda: mw.infer_forward("F.linear", X, spec((8, 7), R)), "PyTorch refuses these arguments"),
    "values": (lambda: mw.infer_forward("nonzero", X), "hangs on values"),
    "outputs": (
        lambda: mw.infer_backward("split", X, 3, 1, outputs=[spec((4, 3), S0)]),
        "has 1 entries, the op gives 2",
    ),
    "more outputs": (lambda: mw.infer_backward("gelu", X, outputs=[X, X]), "has 2 entries, the op gives 1"),
    "dtype": (lambda: mw.infer_backward("gelu", X, outputs=[spec((4, 6), S0, dtype=torch.int64)]), "has dtypes"),
    "shape": (lambda: mw.infer_backward("softmax", X, 1, outputs=[spec((6, 4), S0)]), "has shapes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_calls_that_eager_code_could_not_make_are_refused(what):
    ask, told = REFUSED[what]
    with pytest.raises(RuleError, match=told):
        ask()


def test_an_output_that_may_have_any_layout_does_not_hold_the_others_back():
    """To be whole is a wish, too: to make that of parts costs an all-gather, to cut the other costs nothing."""
    whole, split, any_ = spec((4, 3), R), spec((4, 3), S0), None
    assert mw.infer_backward("split", X, 3, 1, outputs=[split, whole]).inputs[0].layout.placements == (R,)
    assert mw.infer_backward("split", X, 3, 1, outputs=[split, any_]).inputs[0].layout.placements == (S0,)
    assert mw.infer_backward("split", X, 3, 1, outputs=[split, split]).inputs[0].layout.placements == (S0,)
    assert mw.infer_backward("split", X, 3, 1, outputs=[any_, any_]).inputs[0].layout.placements == (R,)


@pytest.mark.parametrize(
    ("name", "rest", "given", "wish"),
    [("softmax", (1,), S1, S1), ("F.softmax", (1,), S1, S1), ("softmax", (1,), R, S0), ("view_as", (X,), R, S1)],
)
def test_backward_inference_of_what_runs_as_other_ops(name, rest, given, wish):
    found = mw.infer_backward(name, spec((4, 6), given), *rest, outputs=[spec((4, 6), wish)])
    assert found.outputs[0].layout.placements == (wish,)
    assert found.inputs[0].layout.placements == (wish,)


def test_backward_inference_of_a_composition_splits_what_it_joins():
    found = mw.infer_backward("hstack", [X, X], outputs=[spec((4, 12), S0)])
    assert [s.layout.placements for s in found.inputs] == [(S0,), (S0,)]
    assert found.bytes == 0


def test_asking_changes_nothing(monkeypatch):
    monkeypatch.setattr(plans, "_WARNED", warned := set())
    x = spec((4, 6), S0)
    state = torch.random.get_rng_state()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        first = mw.infer_forward("dropout", x, 0.5, True), mw.infer_forward("matrix_exp", spec((4, 4), S0))
        assert (mw.infer_forward("dropout", x, 0.5, True), mw.infer_forward("matrix_exp", spec((4, 4), S0))) == first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first[1].kind == "gathered"
    assert not warned  # who then makes the call is told
    with torch.no_grad():
        apart = mw.infer_forward("prod", x)
    assert mw.infer_forward("prod", x) == apart  # of inputs that need a gradient, wherever one asks
