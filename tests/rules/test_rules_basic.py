"""Rules of elementwise ops, contractions, reductions, views and indices, against the single device.

Each case is a function and the tensors that it takes.  On each mesh it runs for the placements that one axis
can give each tensor (shards even, uneven and empty; Partial): value and gradients must be the same.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.dispatch import plans
from meshwright.ranks import runtime
from tests.support import sweep as sweeps

Tensor = torch.Tensor
f64 = torch.float64


def real(*shape: int) -> Tensor:
    """Distinct values, positive and negative, none near zero."""
    n = math.prod(shape)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n + 7 * len(shape)))
    return ((order.to(f64) - n / 2 + 0.25) / max(n, 1) * 3).reshape(shape)


def positive(*shape: int) -> Tensor:
    return real(*shape).abs() + 0.3


def tied(*shape: int) -> Tensor:
    """Few different values: extrema are attained several times."""
    return (real(*shape) * 2).round()


def mask(*shape: int) -> Tensor:
    return real(*shape) > 0


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def cplx(*shape: int) -> Tensor:
    return torch.complex(real(*shape), real(*shape).flip(0))


@dataclass
class Case:
    name: str
    fn: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    partial: bool = True  # whether tensors are given Partial, too


CASES: list[Case] = []


def case(name: str, fn: Callable[..., Any], *tensors: Tensor, partial: bool = True) -> None:
    CASES.append(Case(name, fn, tensors, partial))


# ------------------------------------------------------------------------------------------------ pointwise

case("add", torch.add, real(5, 3), real(3))
case("add alpha", lambda x, y: torch.sub(x, y, alpha=2), real(5, 3), real(5, 1))
case("add number", lambda x: 1 + x - 2, real(5, 3))
case("rsub", lambda x, y: torch.rsub(x, y, alpha=3), real(5), real(5))
case("mul", torch.mul, real(5, 3), real(5, 1))
case("mul number", lambda x: 2 * x / 3, real(5, 3))
case("div", torch.div, real(5, 3), positive(5, 3))
case("div floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), real(5), positive(5))
case("neg", lambda x: -x, real(5, 3))
case("where", torch.where, mask(5, 3), real(5, 3), real(3))
case("where number", lambda c, x: torch.where(c, x, 1.0), mask(5, 3), real(5, 3))
case("masked_fill", lambda x, m: x.masked_fill(m, 2.0), real(5, 3), mask(5, 3))
case("masked_fill tensor", lambda x, m, v: x.masked_fill(m, v), real(5, 3), mask(5, 3), real())
case("lerp", lambda x, y: torch.lerp(x, y, 0.3), real(5), real(5))
case("lerp weight", torch.lerp, real(5), real(5), positive(5))
case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=0.5), real(4), real(4), real(4))
case("addcdiv", torch.addcdiv, real(4), real(4), positive(4))
case("gelu", F.gelu, real(5, 3))
case("pow", lambda x: x**3, real(5))
case("rpow", lambda x: 2**x, real(5))
case("rdiv", lambda x: 2 / x, positive(5))
case("clamp", lambda x: x.clamp(-0.5, 0.5), real(5, 3))
case("clamp tensor", lambda x, y: x.clamp(max=y), real(5, 3), real(3))
case("maximum", torch.maximum, real(5, 3), real(5, 3) * 0.9)
case("max other", torch.max, real(5, 3), real(5, 3) * 0.9)
case("eq", lambda x, y: x == y, tied(5, 3), tied(5, 3))
case("bits", lambda x, y: ~x & y | x, mask(5, 3), mask(5, 3))
case("float32", lambda x: x.float().double(), real(5, 3))
case("to dtype", lambda x: x.to(torch.float32), real(5, 3))
case("to int", lambda x: x.long(), real(5, 3) * 4)
case("to other", lambda x, y: x.to(y), real(5, 3), real(4).float())
case("type_as", lambda x, y: x.type_as(y), real(5, 3), real(4).float())
case("clone", lambda x: x.clone().contiguous(), real(5, 3))
case("zeros_like", lambda x: torch.zeros_like(x) + torch.ones_like(x) * x, real(5, 3))
case("frexp", torch.frexp, real(5), partial=False)
case("complex", torch.complex, real(5), real(5))
case("real", lambda x: x.real + x.conj().imag, cplx(5), partial=False)
case("special", torch.special.expit, real(5))
case("isin", torch.isin, ints(4, 5), ints(2, 3))
case("nan_to_num", torch.nan_to_num, real(5))

# --------------------------------------------------------------------------------------------- contractions

case("linear", F.linear, real(3, 5, 4), real(6, 4), real(6))
case("linear no bias", F.linear, real(5, 4), real(6, 4))
case("linear vector", F.linear, real(5, 4), real(4))
case("matmul 2 2", torch.matmul, real(5, 4), real(4, 6))
case("matmul 1 1", torch.matmul, real(5), real(5))
case("matmul 1 2", torch.matmul, real(4), real(4, 6))
case("matmul 3 1", torch.matmul, real(2, 5, 4), real(4))
case("matmul 1 3", torch.matmul, real(4), real(2, 4, 5))
case("matmul 3 2", torch.matmul, real(3, 5, 4), real(4, 6))
case("matmul 2 3", torch.matmul, real(5, 4), real(3, 4, 6))
case("matmul 4 3", torch.matmul, real(2, 1, 5, 4), real(3, 4, 2))
case("mm", torch.mm, real(5, 4), real(4, 1))
case("bmm", torch.bmm, real(5, 3, 4), real(5, 4, 2))
case("mv", torch.mv, real(5, 4), real(4))
case("dot", torch.dot, real(5), real(5))
case("inner", torch.inner, real(2, 5, 4), real(3, 4))
case("kron", torch.kron, real(3, 5), real(4, 1))
case("kron of other dims", torch.kron, real(3), real(2, 1, 5))
case("kron of what is not contiguous", lambda x, y: torch.kron(x.t(), y.t()), real(3, 5), real(5, 2))
case("outer", torch.outer, real(5), real(3))
case("addmm", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), real(6), real(5, 4), real(4, 6))
case("addmm column", torch.addmm, real(5, 1), real(5, 4), real(4, 6))
case("addmv", torch.addmv, real(5), real(5, 4), real(4))
case("addr", torch.addr, real(5, 3), real(5), real(3))
case("baddbmm", torch.baddbmm, real(1, 3, 2), real(5, 3, 4), real(5, 4, 2))
case("addbmm", torch.addbmm, real(3, 2), real(5, 3, 4), real(5, 4, 2))
case("bilinear", F.bilinear, real(5, 3), real(5, 2), real(4, 3, 2), real(4))
case("vecdot", torch.linalg.vecdot, real(5, 4), real(4))
case("vecdot dim", lambda x, y: torch.linalg.vecdot(x, y, dim=0), real(5, 4), real(5, 4))
case("cross", lambda x, y: torch.linalg.cross(x, y), real(5, 3), real(5, 3))
case("cross no dim", lambda x, y: torch.cross(x, y), real(5, 3), real(5, 3))
case("tensordot", lambda x, y: torch.tensordot(x, y, 2), real(2, 5, 4), real(5, 4, 3))
case("tensordot dims", lambda x, y: torch.tensordot(x, y, ([0, 2], [1, 0])), real(5, 2, 4), real(4, 5, 3))
case("einsum mm", lambda x, y: torch.einsum("ik,kj->ij", x, y), real(5, 4), real(4, 6))
case("einsum implicit", lambda x, y: torch.einsum("ba,bc", x, y), real(5, 4), real(5, 3))
case("einsum dots", lambda x, y: torch.einsum("...ik,...kj->...ji", x, y), real(2, 5, 4), real(4, 3))
case("einsum dots summed", lambda x, y: torch.einsum("...k,k->k", x, y), real(5, 2, 4), real(4))
case("einsum diagonal", lambda x: torch.einsum("iij->ij", x), real(5, 5, 4))
case("einsum trace", lambda x, y: torch.einsum("ii,i->", x, y), real(5, 5), real(5))
case("einsum three", lambda x, y, z: torch.einsum("bi,ij,bj->b", [x, y, z]), real(5, 4), real(4, 3), real(5, 3))
case("einsum one", lambda x, y: torch.einsum("bi,bi->i", x, y), real(5, 4), real(1, 4))
case("multi_dot", lambda *t: torch.linalg.multi_dot(t), real(5, 4), real(4, 3), real(3, 2))

# ------------------------------------------------------------------------------------------------ reductions

for dim in (None, 0, -1, (0, 2), ()):
    case(f"sum {dim}", lambda x, dim=dim: torch.sum(x, dim), real(5, 2, 6))
    case(f"mean {dim}", lambda x, dim=dim: torch.mean(x, dim), real(5, 2, 6))
    if dim != ():  # PyTorch's own gradient of var(x, ()) is wrong
        case(f"var {dim}", lambda x, dim=dim: torch.var(x, dim), real(5, 2, 6))
        case(f"amax {dim}", lambda x, dim=dim: torch.amax(x, dim or ()), tied(5, 2, 6))
        case(f"norm {dim}", lambda x, dim=dim: torch.linalg.vector_norm(x, 2, dim), real(5, 2, 6))
        case(f"any {dim}", lambda x, dim=dim: torch.any(x, dim), mask(5, 2, 6))
        case(f"logsumexp {dim}", lambda x, dim=dim: torch.logsumexp(x, dim or (0, 1, 2)), real(5, 2, 6))
case("sum keepdim", lambda x: x.sum(0, keepdim=True), real(5, 3))
case("sum dtype", lambda x: x.sum(1, dtype=torch.float32), real(3, 5))
case("sum bool", lambda x: x.sum(0), mask(5, 3))
case("sum scalar", lambda x: x.sum(), real())
case("sum axis", lambda x: torch.sum(x, axis=0, keepdims=True), real(5, 3))
case("mean keepdim", lambda x: x.mean((0, 1), keepdim=True), real(5, 3))
case("mean half", lambda x: x.half().mean(0), real(5, 3))
case("nansum", lambda x: torch.nansum(x, 0), real(5, 3))
case("nanmean", lambda x: torch.nanmean(x, 0), real(5, 3))
case("count_nonzero", lambda x: torch.count_nonzero(x, 0), tied(5, 3))
case("all", lambda x: torch.all(x, 0, keepdim=True), tied(5, 3) > -2)
case("any uint8", lambda x: x.any(0), mask(5, 3).to(torch.uint8))
case("prod", lambda x: torch.prod(x, 0), real(5, 3))
case("prod all", lambda x: torch.prod(x), real(5))
case("prod int", lambda x: torch.prod(x, 0), ints(3, 5, 2) + 1)
case("trace", torch.trace, real(5, 4))
case("amin keepdim", lambda x: torch.amin(x, 1, keepdim=True), tied(5, 6))
case("amax int", lambda x: torch.amax(x, 0), ints(9, 5, 3))
case("amax bool", lambda x: torch.amax(x, 0), mask(5, 3))
case("max", lambda x: x.max(), tied(5, 6))
case("min", lambda x: x.min(), tied(5))
case("max dim", lambda x: torch.max(x, 0), tied(5, 6))
case("min dim keepdim", lambda x: torch.min(x, 1, keepdim=True), tied(5, 6))
case("max dim values", lambda x: torch.max(x, dim=0).values, tied(5, 6))
case("max all -inf", lambda x: torch.max(x - math.inf, 0), real(5, 2), partial=False)
case("aminmax", lambda x: torch.aminmax(x, dim=0), tied(5, 6))
case("aminmax all", lambda x: torch.aminmax(x), tied(5, 6))
case("argmax", lambda x: torch.argmax(x), tied(5, 6))
case("argmax dim", lambda x: torch.argmax(x, 0), tied(5, 6))
case("argmin keepdim", lambda x: torch.argmin(x, 1, keepdim=True), tied(5, 6))
case("std", lambda x: torch.std(x, 0, correction=0), real(5, 3))
case("std all", lambda x: torch.std(x), real(5, 3))
case("std zero", lambda x: torch.std(x * 0 + 1, 0), real(5, 3), partial=False)
case("var unbiased", lambda x: x.var(0, False, keepdim=True), real(5, 3))
case("var of one", lambda x: torch.var(x, 0).isnan(), real(1, 5), partial=False)
case("var_mean", lambda x: torch.var_mean(x, 0), real(5, 3))
case("std_mean", lambda x: torch.std_mean(x, (0, 1), keepdim=True), real(5, 3))
for order in (0, 1, 2, 3, 0.5, 2.5, -1, math.inf, -math.inf):
    case(f"vector_norm {order}", lambda x, p=order: torch.linalg.vector_norm(x, p, 0), real(5, 3))
case("vector_norm of zeros", lambda x: torch.linalg.vector_norm(x * 0, 2, 0), real(5, 3), partial=False)
case("vector_norm zero in", lambda x: torch.linalg.vector_norm(x, 1.5, 0), tied(5, 3), partial=False)
case("vector_norm dtype", lambda x: torch.linalg.vector_norm(x, dtype=torch.float64), real(5, 3).float())
case("norm", lambda x: x.norm(), real(5, 3))
case("norm p", lambda x: torch.norm(x, p=3, dim=0), real(5, 3))
case("linalg.norm", lambda x: torch.linalg.norm(x), real(5, 3))
case("linalg.norm dim", lambda x: torch.linalg.norm(x, math.inf, dim=0), tied(5, 3))
case("dist", lambda x, y: torch.dist(x, y, 2), real(5, 3), real(3))
case("cumsum", lambda x: torch.cumsum(x, 0), real(5, 3))
case("cumprod", lambda x: torch.cumprod(x, 1), real(5, 3))
case("cummax", lambda x: torch.cummax(x, 0), real(5, 3))
case("logcumsumexp", lambda x: torch.logcumsumexp(x, 0), real(5, 3))
case("sort", lambda x: torch.sort(x, 0, descending=True), real(5, 3))
case("argsort", lambda x: torch.argsort(x, 1), real(5, 3))
case("topk", lambda x: torch.topk(x, 2, 0), real(5, 3))
case("kthvalue", lambda x: torch.kthvalue(x, 2, 1, keepdim=True), real(5, 3))
case("mode", lambda x: torch.mode(x, 0), tied(5, 3))
case("median", lambda x: torch.median(x), real(5, 3))
case("median dim", lambda x: torch.median(x, 1), real(5, 3))
case("quantile", lambda x: torch.quantile(x, 0.3, 1), real(5, 3))
case(
    "quantile q",
    lambda x, q: torch.quantile(x, q, 0, keepdim=True),
    real(5, 3),
    torch.tensor([0.2, 0.7], dtype=f64),
    partial=False,
)
case("diff", lambda x: torch.diff(x, dim=0), real(5, 3))
case("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), real(5, 3))

# ------------------------------------------------------------------------------------------------ views

case("reshape split", lambda x: x.reshape(2, 6, 2, 2), real(2, 6, 4))
case("reshape merge", lambda x: x.reshape(12, -1), real(2, 6, 4))
case("view", lambda x: x.view(6, 4, 3), real(6, 12))
case("view other", lambda x: x.view(4, 6), real(6, 4))
case("view ones", lambda x: x.view(1, 5, 1, 3), real(5, 3))
case("view size", lambda x: x.view(size=(15,)), real(5, 3))
case("view dtype", lambda x: x.view(torch.int64), real(5, 3), partial=False)
case("view dtype smaller", lambda x: x.view(torch.float32), ints(9, 5, 3))
case("view_as", lambda x, y: x.view_as(y), real(5, 4), real(5, 2, 2))
case("flatten", lambda x: x.flatten(1), real(5, 2, 3))
case("flatten 0", lambda x: torch.flatten(x), real())
case("ravel", torch.ravel, real(6, 2))
case("unflatten", lambda x: x.unflatten(1, (3, -1)), real(5, 6))
case("transpose", lambda x: x.transpose(0, -1), real(5, 2, 3))
case("t", lambda x: x.t() @ x.T.mT, real(5, 3), partial=False)
case("permute", lambda x: x.permute(2, 0, 1), real(5, 2, 3))
case("movedim", lambda x: torch.movedim(x, (0, 1), (-1, 0)), real(5, 2, 3))
case("squeeze", lambda x: x.squeeze(), real(5, 1, 3))
case("squeeze dim", lambda x: x.squeeze(0).squeeze((1, 2)), real(5, 1, 3))
case("unsqueeze", lambda x: x.unsqueeze(-1), real(5, 3))
case("expand", lambda x: x.expand(2, 5, -1, 6), real(5, 3, 1))
case("expand_as", lambda x, y: x.expand_as(y), real(3), real(5, 3), partial=False)
case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), real(5, 1), real(3))
case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="xy"), real(5), real(3))
case("atleast_2d", lambda x: torch.atleast_2d(x), real(5))
case("repeat", lambda x: x.repeat(2, 1, 3), real(5, 3))
case("tile", lambda x: torch.tile(x, (2,)), real(5, 3))
case("repeat_interleave", lambda x: x.repeat_interleave(2, 0), real(4, 3))
case("repeat_interleave flat", lambda x: x.repeat_interleave(2), real(8))
case("unfold", lambda x: x.unfold(1, 2, 1), real(5, 3))
case("flip", lambda x: x.flip(1), real(5, 3))
case("roll", lambda x: torch.roll(x, 1, 0), real(5, 3))
case("rot90", lambda x: torch.rot90(x, 1, (1, 2)), real(5, 2, 3))
case("rot90 of one row", lambda x: torch.rot90(x, 1, (-2, 0)), real(5, 1, 1, 3), partial=False)
case("tril", lambda x: torch.tril(x, -1), real(5, 6))
case("triu", lambda x: x.triu(1), real(2, 5, 6))
case("diagonal", lambda x: torch.diagonal(x, 1, 1, 2), real(5, 3, 4))
case("diag", lambda x: torch.diag(x), real(5))
case("diag_embed", lambda x: torch.diag_embed(x), real(5, 3))
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), real(5, 8, 2, 3))
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), real(2, 1, 8, 2))
case("view_as_real", lambda x: torch.view_as_real(x), cplx(5, 3), partial=False)
case("view_as_complex", lambda x: torch.view_as_complex(x), real(5, 2))
case("chunk", lambda x: x.chunk(2, 1), real(5, 3))
case("split", lambda x: x.split([1, 2], -1), real(5, 3))
case("split size", lambda x: torch.split(x, 2), real(5, 3))
case("tensor_split", lambda x: torch.tensor_split(x, (1, 3), 0), real(5, 3))
case("hsplit", lambda x: torch.hsplit(x, 2), real(5, 4))
case("unbind", lambda x: x.unbind(1), real(5, 3))
case("narrow", lambda x: x.narrow(0, 1, 3), real(5, 3))
case("select", lambda x: x.select(1, 2), real(5, 3))
case("cat", lambda x, y: torch.cat([x, y, x], 1), real(5, 3), real(5, 2))
case("cat empty", lambda x: torch.cat([x.new_zeros(0), x], 0), real(5, 3))
case("cat beside nothing", lambda x, y: torch.cat([y, x, x.new_zeros(0)], 1), real(5, 3), real(5, 0))
case("stack", lambda x, y: torch.stack([x, y], 1), real(5, 3), real(5, 3))
case("hstack", lambda x, y: torch.hstack([x, y]), real(5, 3), real(5, 1))
case("vstack", lambda x, y: torch.vstack([x, y]), real(5), real(5))
case("column_stack", lambda x, y: torch.column_stack([x, y]), real(5), real(5, 2))
case("pad", lambda x: F.pad(x, (1, 2)), real(5, 3))
case("pad value", lambda x: F.pad(x, (0, 0, 1, 0), value=2.0), real(5, 3))
case("pad reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), real(5, 2, 4))
case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, 0, 2), real(5, 3), real(5, 2))
case("select_scatter", lambda x, y: torch.select_scatter(x, y, 0, 2), real(5, 3), real(3))

# ------------------------------------------------------------------------------------------------ indices

case("getitem int", lambda x: x[2], real(5, 3))
case("getitem mixed", lambda x: x[..., None, -1:], real(5, 2, 3))
case("getitem step", lambda x: x[:, ::2], real(5, 6))
case("getitem empty", lambda x: x[:, 2:2], real(5, 6))
case("getitem list", lambda x: x[:, [0, 2]], real(5, 3))
case("getitem index", lambda x, i: x[i], real(6, 3), ints(6, 5))
case("getitem negative index", lambda x, i: x[i], real(6, 3), ints(6, 5, 2) - 6)
case("getitem inner index", lambda x, i: x[:, i, None, 1], real(5, 6, 3), ints(6, 4))
case("getitem two indices", lambda x, i, j: x[:, i, j], real(5, 4, 3), ints(4, 2, 1), ints(3, 5))
case("getitem apart", lambda x, i, j: x[i, :, j], real(5, 4, 3), ints(5, 5), ints(3, 5))
case("getitem mask", lambda x, m: x[m], real(5, 3), mask(5, 3))
case("index_select", lambda x, i: torch.index_select(x, 1, i), real(5, 6), ints(6, 4))
case("index_select bool", lambda x, i: torch.index_select(x, 0, i), mask(6, 3), ints(6, 4))
case("gather", lambda x, i: torch.gather(x, 1, i), real(5, 6), ints(6, 5, 4))
case("gather part", lambda x, i: torch.gather(x, 0, i), real(5, 6), ints(5, 7, 4))
case("gather column", lambda x, i: x.gather(-1, i), real(5, 6), ints(6, 5, 1))
case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), real(5, 6), ints(6, 1, 4))
case("scatter", lambda x, i, y: x.scatter(1, i, y), real(5, 6), torch.arange(6).expand(5, 6), real(5, 6))
case("scatter number", lambda x, i: x.scatter(1, i, 2.0), real(5, 6), ints(6, 5, 2))
case("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), real(5, 3), ints(3, 5, 4), real(5, 4))
case("scatter_add part", lambda x, i, y: x.scatter_add(0, i, y), real(5, 4), ints(5, 6, 2), real(6, 2))
case(
    "scatter_reduce",
    lambda x, i, y: x.scatter_reduce(1, i, y, "amax"),
    real(5, 3),
    ints(3, 5, 4),
    real(5, 4) * 2,
)
case(
    "scatter_reduce sum",
    lambda x, i, y: x.scatter_reduce(1, i, y, "sum"),
    real(5, 3),
    ints(3, 5, 4),
    real(5, 4),
)
case("index_add", lambda x, i, y: x.index_add(0, i, y, alpha=2), real(5, 3), ints(5, 4), real(4, 3))
case("index_copy", lambda x, i, y: x.index_copy(1, i, y), real(5, 4), torch.tensor([2, 0]), real(5, 2))
case("index_fill", lambda x, i: x.index_fill(1, i, 2.0), real(5, 4), ints(4, 2))
case("index_put", lambda x, i, y: x.index_put((i,), y, accumulate=True), real(5, 3), ints(5, 4), real(4, 3))
case("index_put mask", lambda x, m, y: x.index_put((m,), y), real(5, 3), mask(5, 3), real())
case("one_hot", lambda x: F.one_hot(x, 6), ints(6, 5))
case("searchsorted", torch.searchsorted, torch.arange(5, dtype=f64), real(5, 3), partial=False)
case("bucketize", lambda x, b: torch.bucketize(x, b), real(5, 3), torch.arange(5, dtype=f64), partial=False)


def written(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An op in place on something that has a history."""

    def run(x: Any, *rest: Any) -> Any:
        y = x * 1
        fn(y, *rest)
        return y

    return run


def put(*index: Any) -> Callable[..., Any]:
    return written(lambda x, value: x.__setitem__(index if len(index) > 1 else index[0], value))


every = slice(None)
case("setitem slice", put(every, slice(1, 3)), real(5, 4), real(2), partial=False)
case("setitem rows", put(slice(1, 5, 2)), real(6, 4), real(2, 4), partial=False)
case("setitem int", put(-2, every), real(5, 4), real(4), partial=False)
case("setitem column", put(..., 2), real(5, 4), real(), partial=False)
case("setitem new dim", put(slice(2, 4), None), real(5, 4), real(2, 1, 4), partial=False)
case("setitem list", put([0, 3]), real(5, 4), real(2, 4), partial=False)
case("setitem zero", written(lambda x: x.__setitem__((every, 1), 0)), real(5, 4))
case("setitem number", written(lambda x: x.__setitem__((slice(0, 3), 1), 2.5)), real(5, 4), partial=False)
case("setitem mask", written(lambda x, m: x.__setitem__(m, 2.0)), real(5, 4), mask(5, 4), partial=False)
case(
    "setitem index",
    written(lambda x, i: x.__setitem__((every, i), 2.0)),
    real(5, 4),
    ints(4, 2),
    partial=False,
)


def put_at(x: Any, i: Any, y: Any) -> None:
    x[:, i, 1:] = y


def put_two(x: Any, i: Any, j: Any, y: Any) -> None:
    x[i, :, j] = y


case(
    "setitem index value",
    written(put_at),
    real(3, 5, 4),
    torch.tensor([[0, 4], [2, 3]]),
    real(2, 2, 3),
    partial=False,
)
case(
    "setitem two",
    written(put_two),
    real(5, 3, 4),
    torch.tensor([0, 3]),
    torch.tensor([[1, 2]]),
    real(2, 3),
    partial=False,
)
case(
    "index_add_",
    written(lambda x, i, y: x.index_add_(0, i, y)),
    real(5, 3),
    ints(5, 4),
    real(4, 3),
    partial=False,
)
case(
    "index_put_",
    written(lambda x, i, y: x.index_put_((i,), y)),
    real(5, 3),
    torch.tensor([3, 1]),
    real(3),
    partial=False,
)
case("squeeze_", written(lambda x: x.squeeze_()), real(5, 4, 1))
case(
    "scatter_reduce_",
    written(lambda x, i, y: x.scatter_reduce_(0, i, y, "amax", include_self=False)),
    *(real(5, 4), ints(5, 3, 4), real(3, 4) * 2),
    partial=False,
)
case("tril_", written(lambda x: x.tril_()), real(5, 4))
case("add_", written(lambda x, y: x.add_(y)), real(5, 4), real(4), partial=False)


# ------------------------------------------------------------------------------------------------ the check


def layouts(t: Tensor, partial: bool) -> list[Any]:
    """What one axis can do to a tensor."""
    found: list[Any] = [mw.Replicate()]
    found += [mw.Shard(d) for d, n in enumerate(t.shape) if n != 1]
    if partial and t.is_floating_point():
        found.append(mw.Partial())
    return found


def combinations(c: Case, axes: int) -> Iterator[tuple[tuple[Any, ...], ...]]:
    """Per tensor one placement per axis: all of them on one axis for up to two tensors, else a selection."""
    options = [layouts(t, c.partial) for t in c.tensors]
    if axes == 1:
        every = list(itertools.product(*options))
        step = 1 if len(every) <= 16 else len(every) / 16
        kept = {round(i * step) for i in range(min(len(every), 16))}
        yield from (tuple((p,) for p in combo) for i, combo in enumerate(every) if i in kept and i)
        return
    # Two axes: the second takes the options in another order, so that all pairs of kinds turn up.
    for k in range(1, max(len(o) for o in options)):
        yield tuple((o[k % len(o)], o[-k % len(o)]) for o in options)
        yield tuple((o[k % len(o)], o[k % len(o)]) for o in options)


def laid(t: Tensor, mesh: mw.Mesh, placements: tuple[Any, ...], grad: bool) -> Any:
    """``t`` as a DistTensor; a Partial one from parts that differ from rank to rank."""
    plain = [mw.Replicate() if isinstance(p, mw.Partial) else p for p in placements]
    if plain == list(placements):
        return mw.shard_tensor(t.clone().requires_grad_(grad), mesh, placements, check=False)
    here = mesh.coordinate(runtime.RT.rank)
    share = 1
    for p, n, i in zip(placements, mesh.sizes, here, strict=True):
        if isinstance(p, mw.Partial):
            parts = [2, -2] * n
            share *= parts[i] if i < n - 1 else 1 - sum(parts[: n - 1])  # exact, and they add up to 1
    part = mw.shard_tensor(t, mesh, plain, check=False).to_local() * share
    return mw.from_local(part.detach().requires_grad_(grad), mesh, placements, shape=t.shape, check=False)


def results(made: Any) -> list[Any]:
    return [made] if isinstance(made, Tensor) else list(made)


def loss_of(outs: list[Any]) -> Any:
    """A number that weighs every element of every output differently; None if nothing has a gradient."""
    total = None
    for i, y in enumerate(outs):
        if y.requires_grad:
            y = y if not y.is_complex() else torch.view_as_real(y)
            w = torch.linspace(0.5, 2 + i, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = (y * w).sum() + (0 if total is None else total)
    return total


@dataclass
class Expected:
    outs: list[Tensor]
    grads: list[Tensor | None]


def expected(c: Case) -> Expected:
    leaves = [t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in c.tensors]
    outs = results(c.fn(*leaves))
    loss, wanted = loss_of(outs), [t for t in leaves if t.requires_grad]
    if loss is None or not wanted:
        return Expected([o.detach() for o in outs], [])
    return Expected([o.detach() for o in outs], list(torch.autograd.grad(loss, wanted, allow_unused=True)))


def check(c: Case, want: Expected, mesh: mw.Mesh, combo: tuple[tuple[Any, ...], ...]) -> str:
    Gathered.running[runtime.RT.rank] = c.name
    grads_wanted = [t.is_floating_point() or t.is_complex() for t in c.tensors]
    given = [laid(t, mesh, p, g) for t, p, g in zip(c.tensors, combo, grads_wanted, strict=True)]
    outs = [mw.unshard(y) for y in results(c.fn(*given))]
    for i, (have, ref) in enumerate(zip(outs, want.outs, strict=True)):
        if have.dtype != ref.dtype:
            return f"output {i} is {have.dtype}, not {ref.dtype}"
        tol = 2e-3 if any(t.dtype not in (f64, torch.complex128) for t in (ref, *c.tensors)) else 1e-9
        if have.shape != ref.shape or not torch.allclose(have, ref, tol, tol, equal_nan=True):
            return f"output {i} is {have.tolist()}, not {ref.tolist()}"
    if not want.grads:
        return ""
    loss = loss_of(outs)
    if loss is None:
        return "no output has a gradient"
    leaves = [t for t in given if t.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    for i, (have, ref) in enumerate(zip(grads, want.grads, strict=True)):
        if have is None or ref is None:
            if (have is None or not mw.unshard(have).any()) and (ref is None or not ref.any()):
                continue
            return f"gradient {i} is {have}, not {ref}"
        whole = mw.unshard(have)
        if not torch.allclose(whole, ref, 1e-3 if ref.dtype != f64 else 1e-7, 1e-7, equal_nan=True):
            return f"gradient {i} is {whole.tolist()}, not {ref.tolist()}"
    return ""


def failures(mesh: mw.Mesh, cases: list[Case]) -> list[str]:
    wants = [expected(c) for c in cases]

    def everything() -> list[str]:
        found = []
        for c, want in zip(cases, wants, strict=True):
            for combo in combinations(c, mesh.ndim):
                wrong = check(c, want, mesh, combo)
                if wrong:
                    found.append(f"{c.name} {combo}: {wrong}")
        return found

    try:
        return sorted({w for per_rank in mw.simulate(everything, mesh) for w in per_rank})
    except Exception:
        return one_by_one(mesh, cases)


def one_by_one(mesh: mw.Mesh, cases: list[Case]) -> list[str]:
    """An error on one rank ends a simulation: run each on its own, to name those that fail."""
    found = []
    for c in cases:
        want = expected(c)
        for combo in combinations(c, mesh.ndim):
            try:
                wrong = {w for w in mw.simulate(lambda: check(c, want, mesh, combo), mesh) if w}  # noqa: B023
            except Exception as e:
                wrong = {f"{type(e).__name__}: {e} at {traceback.format_exc().splitlines()[-4:]}"}
            found += [f"{c.name} {combo}: {w}" for w in wrong]
    return found


class Gathered(set[str]):
    """The cases of which an op runs without a rule: dispatch tells, as it would warn."""

    running: ClassVar[dict[int, str]] = {}

    def __contains__(self, _: object) -> bool:
        return False  # each time

    def add(self, _: str) -> None:
        super().add(self.running[runtime.RT.rank])


UNRULED = {"getitem mask"}
FOUR = pytest.param({"x": 4}, marks=pytest.mark.long)  # the parts of three are as uneven, and cost half


@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 2, "y": 2}, FOUR], ids=str)
@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.thin(2)
def test_value_and_gradient(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # On two axes one op in three, but with --whole: each has its strategies per axis.
    cases = CASES if len(axes) == 1 or sweeps.WHOLE else CASES[::3]
    gathered = Gathered()
    monkeypatch.setattr(plans, "_WARNED", gathered)
    wrong = failures(mw.Mesh(axes), cases)
    assert not wrong, "\n".join(wrong)
    assert gathered <= UNRULED, f"run on whole values, right whatever the rules say: {sorted(gathered - UNRULED)}"
