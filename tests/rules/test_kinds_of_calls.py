"""Kinds of calls, one test each: value, gradient, and that a rule divides the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright import collective
from meshwright.dispatch import plans
from tests.rules.test_rules_basic import Case, Gathered, failures, ints, real
from tests.support.compare import laid

Tensor = torch.Tensor
THREE = mw.Mesh({"x": 3})


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares calls of these tensors with one device, for the placements of three ranks."""

    def compared(*calls: tuple[str, Callable[..., Any], list[Tensor]]) -> None:
        cases = [Case(name, fn, tuple(tensors)) for name, fn, tensors in calls]
        gathered = Gathered()
        monkeypatch.setattr(plans, "_WARNED", gathered)
        wrong = failures(THREE, cases)
        assert not wrong, "\n".join(wrong)
        assert not gathered, f"run on whole values: {sorted(gathered)}"

    return compared


def test_a_vector_of_one_tensor_is_no_single_tensor(check):
    x, y = real(4, 3), real(4, 3)
    check(
        ("two", lambda a, b: torch.stack([a, b]), [x, y]),
        ("one", lambda a: torch.stack([a]), [x]),
        ("one along a dim", lambda a: torch.stack([a], 2), [x]),
        ("one in a tuple", lambda a: torch.stack((a,), 1), [x]),
        ("cat of one", lambda a: torch.cat([a], 1), [x]),
        ("cat of one and of two", lambda a, b: (torch.cat([a]), torch.cat([a, b]), torch.cat([a, b, a])), [x, y]),
        ("single", lambda a: torch.cat([a.unsqueeze(0)]), [x]),
        ("einsum", lambda a: torch.einsum("ij->j", a), [x]),
        ("einsum of a list", lambda a: torch.einsum("ij->j", [a]), [x]),
        ("einsum of a diagonal", lambda a: torch.einsum("ii->i", a), [real(4, 4)]),
        ("hstack", lambda a: torch.hstack([a]), [x]),
        ("atleast_1d", lambda a: torch.atleast_1d([a])[0] + torch.atleast_1d(a), [x]),
        ("broadcast_tensors", lambda a: torch.broadcast_tensors(a)[0], [x]),
        ("split into one", lambda a: a.split(4)[0], [x]),
        ("index by one", lambda a, i: (a[(i,)], a[i]), [x, ints(4, 2)]),
    )


def test_matmul_of_operands_of_all_ranks_transposed_or_not(check):
    shapes = [(4,), (2, 4), (3, 2, 4), (2, 1, 5, 4)], [(4,), (4, 6), (3, 4, 2), (3, 4, 5)]
    pairs = [(real(*a), real(*b)) for a in shapes[0] for b in shapes[1]]
    products = [(f"{x.ndim} by {y.ndim}", torch.matmul, [x, y]) for x, y in pairs]
    turned = [
        (f"{x.ndim} by {y.ndim}, transposed", lambda a, b: a.mT @ b.mT, [x.mT.contiguous(), y.mT.contiguous()])
        for x, y in pairs
        if min(x.ndim, y.ndim) > 1
    ]
    x, y, term = real(5, 4), real(4, 6), real(6)
    check(
        *products,
        *turned,
        ("addmm", lambda t, a, b: torch.addmm(t, a, b, beta=0.5, alpha=2), [term, x, y]),
        ("addmm transposed", lambda t, a, b: torch.addmm(t, a, b.t()), [term, x, y.t().contiguous()]),
        ("baddbmm", torch.baddbmm, [real(3, 5, 2), real(3, 5, 4), real(3, 4, 2)]),
        ("addmv", torch.addmv, [real(5), x, real(4)]),
    )


def test_convolutions_with_groups_strides_and_dilations(check):
    """Each operand by itself in every layout, channels of groups together."""
    x, y = real(2, 6, 7, 5), real(2, 6, 11)
    grouped, plain, wide, line = real(6, 2, 3, 3), real(4, 6, 3, 3), real(4, 6, 2, 4), real(6, 6, 3)
    back, bias = real(6, 2, 3, 2), real(6)
    check(
        ("groups of x", lambda a: F.conv2d(a, grouped, bias, padding=1, groups=3), [x]),
        ("groups of the weight", lambda w: F.conv2d(x, w, bias, groups=3), [grouped]),
        ("one channel each", lambda a, w: F.conv1d(a, w, groups=6), [y, real(6, 1, 3)]),
        ("dilation", lambda a: F.conv2d(a, plain, dilation=(2, 1), padding=(2, 1)), [x]),
        ("stride", lambda a: F.conv2d(a, plain, stride=2, padding=1), [x]),
        ("same of even size", lambda a: F.conv2d(a, wide, padding="same"), [x]),
        ("same with dilation", lambda a: F.conv1d(a, line, padding="same", dilation=2), [y]),
        ("contracted", lambda a, w: F.conv1d(a, w), [y, line]),
        ("transposed", lambda a: F.conv_transpose2d(a, back, stride=2, groups=3), [x]),
        ("transposed, of the weight", lambda w: F.conv_transpose2d(x, w, groups=3), [back]),
        ("three dims", lambda a: F.conv3d(a.unsqueeze(2), plain.unsqueeze(2)), [x]),
    )


def test_joins_of_any_number_of_tensors(check):
    x, y, z = real(4, 3), real(4, 3), real(2, 3)
    check(
        ("cat of two", lambda a, b: torch.cat([a, b]), [x, z]),
        ("cat along the second dim", lambda a, b: torch.cat([a, b], 1), [x, real(4, 5)]),
        ("cat along the last dim", lambda a, b: torch.cat([a, b], -1), [x, y]),
        ("cat of three", lambda a, b: torch.cat([a, b, a * 2], 0), [x, z]),
        ("cat beside an empty vector", lambda a: torch.cat([a.new_zeros(0), a], 1), [x]),
        ("cat of vectors", lambda a, b: torch.cat([a, b, a]), [real(5), real(1)]),
        ("cat with a row", lambda a, b: torch.cat([a, b]), [x, real(1, 3)]),
        ("stack", lambda a, b: torch.stack([a, b]), [x, y]),
        ("stack inside", lambda a, b: torch.stack([a, b], 1), [x, y]),
        ("stack at the end", lambda a, b: torch.stack([a, b], -1), [x, y]),
        ("stack of three", lambda a, b: torch.stack([a, b, b - a], 2), [x, y]),
        ("hstack", lambda a, b: torch.hstack([a, b]), [x, y]),
        ("vstack", lambda a, b: torch.vstack([a, b]), [x, z]),
        ("dstack", lambda a, b: torch.dstack([a, b]), [x, y]),
    )


def test_pieces_in_their_order(check):
    x = real(5, 6)
    check(
        ("split", lambda a: a.split(2), [x]),
        ("split by sizes", lambda a: a.split([1, 0, 4]), [x]),
        ("split along the second dim", lambda a: torch.split(a, [1, 3, 2], 1), [x]),
        ("chunk", lambda a: a.chunk(3, 1), [x]),
        ("chunk unevenly", lambda a: a.chunk(3), [x]),
        ("tensor_split", lambda a: torch.tensor_split(a, [1, 4]), [x]),
        ("unbind", lambda a: a.unbind(1), [x]),
        ("unbind along the first dim", lambda a: a.unbind(), [x]),
        ("hsplit", lambda a: torch.hsplit(a, 2), [x]),
        ("many", lambda a: a.split(1), [real(12, 2)]),
    )


def test_pieces_of_a_sum_and_along_a_whole_dim_send_nothing():
    def run():
        part = laid(real(5, 6), THREE, [mw.Partial()])
        rows = mw.shard_tensor(real(5, 6), THREE, [mw.Shard(0)])
        with collective.counting() as counts:
            for made in (part.split(2), part.chunk(2, 1), part.unbind(1), torch.tensor_split(part, 2)):
                assert {t.placements for t in made} == {(mw.Partial(),)}
            for made in (rows.split(2, 1), rows.chunk(3, 1), rows.unbind(1), torch.tensor_split(rows, 2, 1)):
                assert {t.placements for t in made} == {(mw.Shard(0),)}
            assert torch.cat([rows, rows], 1).placements == torch.stack([rows, rows], 1).placements == (mw.Shard(0),)
            joined = torch.cat([part, part]), torch.stack([part, part])
            assert {t.placements for t in joined} == {(mw.Partial(),)}
        assert not counts.total

    mw.simulate(run, THREE)


def test_broadcasting(check):
    check(
        ("trailing", torch.add, [real(5, 3), real(3)]),
        ("a column", torch.mul, [real(5, 3), real(5, 1)]),
        ("a row", lambda a, b: a / (b * b + 1), [real(5, 3), real(1, 3)]),
        ("both ways", torch.mul, [real(5, 1), real(1, 3)]),
        ("more dims", torch.sub, [real(3, 1), real(2, 1, 4)]),
        ("square", torch.mul, [real(3, 3, 3), real(3, 3)]),
        ("expand", lambda a: a.expand(4, 3), [real(1, 3)]),
        ("expand to more dims", lambda a: a.expand(2, 4, -1), [real(4, 3)]),
        ("expand_as", lambda a, b: a.expand_as(b) * b, [real(5, 1), real(5, 3)]),
        ("broadcast_to", lambda a: torch.broadcast_to(a, (4, 5)), [real(5)]),
        ("broadcast_tensors", lambda a, b: torch.broadcast_tensors(a, b), [real(5, 1), real(3)]),
        ("a term of a product", torch.addmm, [real(1, 6), real(5, 4), real(4, 6)]),
        ("a vector to each row", torch.addmm, [real(6), real(5, 4), real(4, 6)]),
        ("batches of products", torch.matmul, [real(1, 5, 4), real(3, 4, 2)]),
    )


def test_moving_picking_and_putting(check):
    x, y, i = real(5, 6), real(5, 6), ints(6, 5, 2)
    check(
        ("transpose", lambda a: a.transpose(0, 1), [x]),
        ("permute", lambda a: a.permute(2, 0, 1), [real(5, 3, 2)]),
        ("movedim", lambda a: a.movedim(0, 2), [real(5, 3, 2)]),
        ("slice", lambda a: a[1:4, ::2], [x]),
        ("slice from the end", lambda a: a[-3:, :-1], [x]),
        ("narrow", lambda a: a.narrow(0, 1, 3), [x]),
        ("select", lambda a: a.select(0, 3), [x]),
        ("select from the end", lambda a: (a[-1], a[:, -2]), [x]),
        ("gather", lambda a: a.gather(1, i), [x]),
        ("gather of a split index", lambda a, j: a.gather(1, j), [x, i]),
        ("index_select", lambda a, j: a.index_select(0, j), [x, ints(5, 7)]),
        ("scatter", lambda a, b: a.scatter(1, torch.arange(6).flip(0).expand(5, 6), b), [x, y]),
        ("scatter_add", lambda a, b: a.scatter_add(0, ints(5, 5, 6), b), [x, y]),
        ("where", lambda a, b: torch.where(a > 0, a, b), [x, y]),
        ("where with a number", lambda a: torch.where(a > 0, a, 0.0), [x]),
    )


def test_elementwise_ops_tagged_or_not(check):
    x, y = real(5, 3), real(5, 3)
    check(
        ("square", torch.square, [x]),
        ("absolute", torch.absolute, [x]),
        ("hardswish", F.hardswish, [x]),
        ("logsigmoid", F.logsigmoid, [x]),
        ("isclose", torch.isclose, [x, y]),
        ("floor_divide", lambda a, b: torch.floor_divide(a.detach(), b.detach()) + a, [x, y]),
        ("maximum", torch.max, [x, y]),
        ("largest of a dim", lambda a: a.max(1), [x]),
        ("smallest of all", lambda a: a.min(), [x]),
        ("norm", lambda a: a.norm(), [x]),
    )


def test_rows_of_a_table_and_its_padding(check):
    table, ids = real(6, 4), torch.tensor([[0, 1, 5], [4, 2, 1]])
    check(
        ("embedding", lambda w: F.embedding(ids, w), [table]),
        ("split indices", lambda w, i: F.embedding(i, w), [table, ids]),
        ("padding", lambda w: F.embedding(ids, w, padding_idx=1), [table]),
        ("padding from the end", lambda w: F.embedding(ids, w, padding_idx=-2), [table]),
        ("uneven", lambda w: F.embedding(ids, w, padding_idx=4), [real(7, 3)]),
    )


def test_norms_of_values_far_from_zero(check):
    x, w, b = real(4, 6) + 5, real(6), real(6)
    check(
        ("layer_norm", lambda a, v, c: F.layer_norm(a, (6,), v, c), [x, w, b]),
        ("layer_norm of all", lambda a: F.layer_norm(a, (4, 6)), [x]),
        ("its weight", lambda v: F.layer_norm(x, (6,), v, b), [w]),
        ("its weight, of one row", lambda v: F.layer_norm(x[:1], (6,), v, b), [w]),
        ("its bias", lambda c: F.layer_norm(x, (6,), w, c), [b]),
        ("rms_norm", lambda a, v: F.rms_norm(a, (6,), v), [x, w]),
        ("group_norm", lambda a, v: F.group_norm(a, 3, v, b), [real(2, 6, 5) + 5, w]),
    )


def test_classes_split_or_not(check):
    x, t, w = real(4, 6), torch.tensor([5, 0, 1, 3]), real(6).abs() + 0.5
    check(
        ("softmax of large numbers", lambda a: torch.softmax(a * 2000, 1), [x]),
        ("log_softmax", lambda a: torch.log_softmax(a * 2000, 0), [x]),
        ("cross entropy", lambda a: F.cross_entropy(a, t), [x]),
        ("some ignored", lambda a: F.cross_entropy(a, t, ignore_index=1), [x]),
        ("weighted", lambda a: F.cross_entropy(a, t, w, ignore_index=3), [x]),
        ("smoothed", lambda a: F.cross_entropy(a, t, w, label_smoothing=0.1), [x]),
        ("a sum", lambda a: F.cross_entropy(a, t, w, reduction="sum"), [x]),
    )


def test_attention_of_groups_masks_and_other_widths(check):
    q, k, v = real(3, 6, 5, 4), real(3, 3, 5, 4), real(3, 3, 5, 2)
    attend, mask = F.scaled_dot_product_attention, real(5, 5) > -1
    check(
        ("queries", lambda a: attend(a, q * 0.5, q), [q]),
        ("keys", lambda a: attend(q, a, q), [q * 0.5]),
        ("values", lambda a: attend(q, q * 0.5, a), [real(3, 6, 5, 2)]),
        ("causal", lambda a, b: attend(a, b, b, is_causal=True), [q, q * 0.5]),
        ("masked", lambda a: attend(a, q, q, mask), [q]),
        ("masked row by row", lambda a: attend(a, q, q, real(3, 1, 5, 5) > -1), [q]),
        ("fewer heads of keys", lambda a: attend(a, k, v, enable_gqa=True), [q]),
        ("fewer heads of keys, split", lambda a, b: attend(q, a, b, enable_gqa=True), [k, v]),
    )


def test_shapes_of_split_dims(check):
    check(
        ("flatten", lambda a: a.flatten(), [real(4, 6)]),
        ("view", lambda a: a.view(2, 12), [real(4, 6)]),
        ("unflatten", lambda a: a.unflatten(1, (3, 2)), [real(4, 6)]),
        ("unflatten unevenly", lambda a: a.view(2, 3, 4), [real(24)]),
        ("heads", lambda a: a.view(2, 3, 3, 2).transpose(1, 2).reshape(2, 3, 6), [real(2, 3, 6)]),
        ("squeeze", lambda a: a.squeeze(1).unsqueeze(0), [real(5, 1)]),
        ("uneven rows", lambda a: a.reshape(-1), [real(5, 3)]),
    )


@pytest.mark.parametrize("op", ["cummax", "cummin", "max", "sort", "median", "mode"])
def test_names_of_fields_are_there_where_a_part_is_empty(op):
    def fn():
        x = mw.shard_tensor(torch.arange(20.0).view(5, 4), mw.Mesh({"x": 4}), {"x": mw.Shard(0)})
        made = getattr(x, op)(1)
        return mw.unshard(made.values), mw.unshard(made.indices)

    for made in mw.simulate(fn, mw.Mesh({"x": 4})):
        whole = getattr(torch.arange(20.0).view(5, 4), op)(1)
        assert all(map(torch.equal, made, whole))
