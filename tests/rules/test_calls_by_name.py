"""PyTorch's own calling conventions: every rule meets its op's arguments by position and by every name they have."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.dispatch.binding import Param, Signature, signatures
from meshwright.dispatch.calls import op_name
from meshwright.rules import COMPOSITES, RULES
from tests.rules.test_opdb import INAPPLICABLE, op_db, samples
from tests.rules.test_opdb import op_name as name_of_case
from tests.support.compare import S0, S1, R, ramp, same

Tensor = torch.Tensor
NEEDED = inspect.Parameter.empty
BOOK = {**RULES, **COMPOSITES}
# Conversions and the like whose names are no ATen ops' (methods of Python, and functions of this project).
NO_SCHEMA = {
    "H", "T", "associative_scan_rows", "bfloat16", "blend_running", "bool", "byte", "carrier", "cdouble", "cfloat",
    "char", "checked_documents", "class_loss", "class_sums", "cpu", "cuda", "document_attention", "document_mask",
    "double", "elements_by_strides", "expert_outputs", "extremum", "first_index", "float", "gated_delta_rows",
    "getitem", "half", "head_sums", "int", "laid_as", "long", "new_tensor", "partial_prod", "scatter_by_strides",
    "setitem", "short", "target_weights", "type", "whole_prod",
}  # fmt: skip
# The rule is for fewer arguments than the op has: what these forms are, and what becomes of them.
NOT_CALLED = {("einsum", "path"), ("normal", "size")}


def _signatures_of(name: str) -> tuple[Signature, ...]:
    if name.startswith("F."):
        return signatures(getattr(F, name[2:]), name)
    found = signatures(None, name)
    python: Any = getattr(torch.functional, name, None)
    return found + (signatures(python, name) if getattr(python, "__module__", "") == "torch.functional" else ())


@pytest.mark.parametrize("name", sorted(BOOK))
def test_every_overload_fits_its_rule(name: str) -> None:
    """What is needed, and all there is, by position; a rule with other names or another order would not bind."""
    found = _signatures_of(name)
    assert bool(found) != (name in NO_SCHEMA), name
    takes = inspect.signature(BOOK[name])
    for signature in found:
        if any((name, p.name) in NOT_CALLED for p in signature):
            continue
        for some in ([p for p in signature if p.default is NEEDED], list(signature)):
            takes.bind(*[0 for p in some if not p.keyword], **{p.name: 0 for p in some if p.keyword})
        mine = [p.name for p in takes.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        theirs = [p.name for p in signature if not p.keyword]
        shared = [n for n in mine if n in theirs]
        assert shared == [n for n in theirs if n in mine], (name, mine, theirs)


# ------------------------------------------------------------------------------------------------ by keyword


def _named(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """A call with a name for every argument, as a user would write it; None where PyTorch takes no such call."""
    for signature in signatures(fn, op_name(fn)):
        positional = [p for p in signature if not p.keyword]
        if len(args) <= len(positional):
            made = {_spelled(p, fn): a for p, a in zip(positional, args, strict=False)} | kwargs
            try:
                fn(**made)
            except Exception:
                continue
            return made
    return None


def _spelled(p: Param, fn: Any) -> str:
    return "input" if p.name == "self" and not inspect.isfunction(fn) else p.name


def _placed(value: Any, mesh: mw.Mesh) -> Any:
    if isinstance(value, Tensor):
        return mw.shard_tensor(value, mesh, [mw.Shard(0)] if value.ndim else [])
    return type(value)(_placed(v, mesh) for v in value) if type(value) in (list, tuple) else value


PARTS = 4  # of the op database


def _calls(part: int) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    seen: set[Any] = set()
    for op in op_db[part::PARTS]:
        known = op_name(op.op) in BOOK or f"F.{op_name(op.op)}" in BOOK
        if not known or name_of_case(op) in INAPPLICABLE or op.op in seen:
            continue
        seen.add(op.op)
        for sample in samples(op, 1):
            made = _named(op.op, (sample.input, *sample.args), sample.kwargs)
            if made is not None and isinstance(op.op(**made), Tensor):
                yield name_of_case(op), op.op, made


def _equal(got: Any, want: Any) -> bool:
    return got.dtype == want.dtype and torch.allclose(mw.unshard(got), want, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("part", [pytest.param(i, marks=[] if i == 0 else pytest.mark.long) for i in range(PARTS)])
def test_every_op_by_keyword(part: int) -> None:
    mesh = mw.Mesh({"x": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = list(_calls(part))

        def run() -> list[str]:
            wrong = []
            for name, fn, named in calls:
                try:
                    if not _equal(fn(**{k: _placed(v, mesh) for k, v in named.items()}), fn(**named)):
                        wrong.append(f"{name}: another value")
                except mw.errors.MeshwrightError as error:
                    wrong.append(f"{name}({', '.join(named)}): {error}")
            return wrong

        assert mw.simulate(run, mesh)[0] == []
    assert len(calls) > 150 // PARTS


# ------------------------------------------------------------------------------------------- other spellings

A, B, INDEX = torch.randn(3, 6), torch.randn(3, 6), torch.randint(0, 6, (3, 6))
SPELLED: list[Callable[..., Any]] = [
    lambda a, b, i: torch.take_along_dim(input=a, indices=i, dim=1),
    lambda a, b, i: torch.matmul(other=b.t(), input=a),
    lambda a, b, i: F.linear(weight=b, input=a),
    lambda a, b, i: torch.bmm(a[None], mat2=b.t()[None]),
    lambda a, b, i: torch.addmm(mat1=a, mat2=b.t(), input=a[:, :3], beta=0.5, alpha=2),
    lambda a, b, i: torch.sum(input=a, dim=1, keepdim=True),
    lambda a, b, i: torch.sum(a, axis=1, keepdims=True),
    lambda a, b, i: torch.sum(x=a, axis=0),
    lambda a, b, i: a.sum(axis=1),
    lambda a, b, i: a.mean(axis=(0, 1)),
    lambda a, b, i: a.std(axis=0, keepdims=True, unbiased=False),
    lambda a, b, i: a.softmax(axis=1),
    lambda a, b, i: a.norm(2, 1, False, torch.float64),
    lambda a, b, i: a.norm(dim=0, p=1, keepdim=True),
    lambda a, b, i: torch.cat(tensors=[a, b], dim=1),
    lambda a, b, i: torch.cat(axis=0, tensors=(a, b)),
    lambda a, b, i: torch.stack(tensors=[a, b], dim=-1),
    lambda a, b, i: torch.add(x1=a, x2=b, alpha=2),
    lambda a, b, i: torch.sub(a, other=b),
    lambda a, b, i: torch.where(condition=a > 0, input=a, other=b),
    lambda a, b, i: a.masked_fill(value=2.0, mask=b > 0),
    lambda a, b, i: a.gather(index=i, dim=1),
    lambda a, b, i: a.scatter(dim=1, index=i, src=b),
    lambda a, b, i: a.clone().scatter_add_(src=b, index=i, dim=1),
    lambda a, b, i: a.clone().add_(other=b, alpha=3),
    lambda a, b, i: a.clone().clamp_(max=0.5),
    lambda a, b, i: a.clone().copy_(other=b),
    lambda a, b, i: a.transpose(dim1=0, dim0=1),
    lambda a, b, i: a.permute(dims=(1, 0)),
    lambda a, b, i: a[:, None, :, None].squeeze(1, 3),
    lambda a, b, i: a[None, :, None].clone().squeeze_(0, -2),
    lambda a, b, i: (a > 0).count_nonzero(1, 0),
    lambda a, b, i: a.view(size=(6, 3)),
    lambda a, b, i: a.reshape(shape=(2, 9)),
    lambda a, b, i: a.expand(size=(2, 3, 6)),
    lambda a, b, i: a.repeat(repeats=(2, 1)),
    lambda a, b, i: a.unsqueeze(dim=0),
    lambda a, b, i: torch.unsqueeze(dim=0, input=a),
    lambda a, b, i: torch.transpose(input=a, dim0=0, dim1=1),
    lambda a, b, i: torch.reshape(shape=(2, 9), input=a),
    lambda a, b, i: torch.narrow(start=1, input=a, dim=1, length=2),
    lambda a, b, i: torch.split(split_size_or_sections=2, tensor=a, dim=1)[0],
    lambda a, b, i: a.split(dim=1, split_size=4)[1],
    lambda a, b, i: a.chunk(chunks=2, dim=1)[1],
    lambda a, b, i: torch.topk(input=a, k=2, dim=1).values,
    lambda a, b, i: torch.max(input=a, dim=1).values,
    lambda a, b, i: torch.max(input=a, other=b),
    lambda a, b, i: a.to(dtype=torch.float64),
    lambda a, b, i: a.to(tensor=b.double()),
    lambda a, b, i: a.type_as(other=b.double()),
    lambda a, b, i: a.new_full(size=(2, 3), fill_value=1.5),
    lambda a, b, i: a.new_zeros(size=(3, 6), dtype=torch.int64),
    lambda a, b, i: torch.full_like(input=a, fill_value=2.0),
    lambda a, b, i: F.embedding(input=i, weight=b.t()),
    lambda a, b, i: F.cross_entropy(target=i[:, 0], input=a, reduction="sum"),
    lambda a, b, i: F.softmax(input=a, dim=1, dtype=torch.float64),
    lambda a, b, i: F.layer_norm(input=a, weight=b[0], normalized_shape=(6,), bias=b[1]),
    lambda a, b, i: F.gelu(input=a, approximate="tanh"),
    lambda a, b, i: F.pad(input=a, pad=(1, 1), value=2.0),
    lambda a, b, i: F.scaled_dot_product_attention(query=a[None], value=b[None], key=b[None], is_causal=True),
    lambda a, b, i: torch.einsum("ij,kj->ik", a, b),
    lambda a, b, i: torch.tensordot(a=a, b=b.t(), dims=1),
    lambda a, b, i: torch.gather(input=a, dim=1, index=i % 4),
    lambda a, b, i: torch.mul(input=a.sum(0), other=b[0]),
    lambda a, b, i: torch.matmul(input=a.t(), other=b[:3] + 0 * a),
]  # fmt: skip


def test_other_spellings() -> None:
    """Values and gradients, of parts by rows."""
    mesh = mw.Mesh({"x": 2})

    def graded(fn: Callable[..., Any], a: Any, b: Any, i: Any) -> list[Any]:
        y = fn(a, b, i)
        if not y.requires_grad:
            return [y]
        return [y, *[g for g in torch.autograd.grad((y * y).sum(), (a, b), allow_unused=True) if g is not None]]

    def run() -> list[str]:
        wrong = []
        for n, fn in enumerate(SPELLED):
            want = graded(fn, A.clone().requires_grad_(), B.clone().requires_grad_(), INDEX)
            a, b, i = (mw.shard_tensor(t.clone(), mesh, [mw.Shard(0)]) for t in (A, B, INDEX))
            try:
                for times in (1, 2, 3):  # planned, by the plan's route, known by its key
                    got = graded(fn, a.requires_grad_(), b.requires_grad_(), i)
                    if len(got) != len(want) or not all(_equal(g, w) for g, w in zip(got, want, strict=True)):
                        wrong.append(f"{n}: another value, call {times}")
            except (mw.errors.MeshwrightError, IndexError) as error:
                wrong.append(f"{n}: {error}")
        return wrong

    assert mw.simulate(run, mesh)[0] == []


def test_a_lent_dtype_moves_nothing() -> None:
    """``type_as`` reads the dtype of its argument alone, whatever its layout, also where it returns its input."""
    mesh = mw.Mesh({"x": 3})
    t = torch.arange(24.0).reshape(4, 6)

    def run() -> None:
        for kind in (mw.Partial(), mw.Partial("max"), mw.Shard(0)):
            for dtype in (torch.float32, torch.float64):
                other = mw.reshard(mw.shard_tensor(t.to(dtype), mesh, []), [kind])
                for mine in (mw.Replicate(), mw.Partial(), mw.Shard(1)):
                    x = mw.reshard(mw.shard_tensor(t, mesh, []), [mine])
                    with mw.explicit() if x.dtype == dtype else contextlib.nullcontext():  # a sum of float64 is larger
                        made = [x.type_as(other) for _ in range(2)]
                    for y in (*made, *[x.to(other) for _ in range(2)]):
                        assert y.dtype == dtype
                        assert torch.equal(mw.unshard(y), t.to(dtype))
                    assert made[0].placements == x.to(dtype).placements

    mw.simulate(run, mesh)


def test_methods_whose_tensor_is_not_the_first_argument_of_the_op() -> None:
    """Rules are written for the order of the op's schema; these are all that PyTorch has."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name, listed = schema.name.removeprefix("aten::"), [a.name for a in schema.arguments]
        if schema.name.startswith("aten::") and hasattr(torch.Tensor, name) and "self" in listed[1:]:
            found.add(name)
    assert found == {"where", "polygamma"}

    mesh = mw.Mesh({"a": 2, "b": 2})
    x, y = (torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    layouts = [mw.Replicate(), mw.Shard(0), mw.Partial(), mw.Partial("max")]

    def outcome(x: Any, y: Any, c: Any) -> list[Any]:
        outs = [x.where(c, y), x.where(condition=c, other=y), y.where(c, x), x.abs().polygamma(1)]
        return [*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), [x, y])]

    want = outcome(x.clone().requires_grad_(), y.clone().requires_grad_(), x > 0)

    def run() -> None:
        for p in layouts:
            for q in layouts:
                a = mw.shard_tensor(x.clone(), mesh, {"a": p}).requires_grad_()
                b = mw.shard_tensor(y.clone(), mesh, {"a": q, "b": mw.Shard(1)}).requires_grad_()
                for c in (mw.shard_tensor(x > 0, mesh, {"a": mw.Shard(0)}), mw.shard_tensor(x > 0, mesh, {})):
                    got = [mw.unshard(t) for t in outcome(a, b, c)]
                    torch.testing.assert_close(got, want, msg=lambda m: f"{p}, {q}: {m}")  # noqa: B023

    mw.simulate(run, mesh)


def test_defaults_stand_for_what_is_left_out_between_names():
    calls = [
        lambda x: x.topk(2, largest=False)[0],
        lambda x: torch.diag_embed(x, dim2=0),
        lambda x: torch.sort(x, descending=True)[0],
        lambda x: torch.flatten(x, end_dim=1),
        lambda x: torch.roll(x, shifts=2, dims=1),
        lambda x: x.sum(axis=1, keepdims=True),
        lambda x: F.layer_norm(x, (4,), eps=0.5),
        lambda x: torch.std(x, dim=0, keepdim=True),
        lambda x: torch.unflatten(x, dim=1, sizes=(2, 2)),
    ]
    for p in (S0, S1, R):
        same(lambda x: [call(x) for call in calls], (ramp(6, 4).sin(), (p,)))
