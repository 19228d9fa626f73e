"""How a strategy is chosen: candidates, bytes, ties, orders of axes; forward and backward inference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright import collective
from meshwright.errors import MeshwrightError, RuleError
from meshwright.layout import Partial, Replicate, Shard
from tests.support.compare import FOUR, GRID, S0, S1, P, R, on_ranks, plain, ramp
from tests.support.strategies import layouts, mesh_of, meshes


def spec(shape, *p, mesh=GRID, dtype=torch.float32, order=None):
    return mw.Spec(shape, dtype, mw.Layout(mesh, p, order=order, ndim=len(shape)))


def forward(op, *args, **kwargs):
    """Placements that the inputs are brought to, and those of the outputs."""
    found = mw.infer_forward(op, *args, **kwargs)
    return [s.layout.placements for s in found.inputs], [s.layout.placements for s in found.outputs]


# ------------------------------------------------------------------------------------------ the Megatron patterns


def test_column_and_row_parallel_linear():
    assert forward("linear", spec((64, 16), S0, R), spec((32, 16), R, S0)) == ([(S0, R), (R, S0)], [(S0, S1)])
    assert forward("linear", spec((64, 32), S0, S1), spec((16, 32), R, S1)) == ([(S0, S1), (R, S1)], [(S0, P)])


def test_embedding_by_vocabulary_and_by_hidden():
    tokens = spec((8, 6), S0, R, dtype=torch.int64)
    assert forward("embedding", spec((100, 16), R, S0), tokens)[1] == [(S0, P)]
    assert forward("embedding", spec((100, 16), R, S1), tokens)[1] == [(S0, mw.Shard(2))]


def test_attention_over_batch_and_heads():
    q = spec((4, 8, 16, 4), S0, S1)
    assert forward("scaled_dot_product_attention", q, q, q) == ([(S0, S1)] * 3, [(S0, S1)])


def test_norms_want_their_dim_whole():
    """No split of it is kept by the op; where it is split already, its statistics are summed instead."""
    ins, outs = forward("layer_norm", spec((8, 16), S0, R), (16,))
    assert (ins, outs) == ([(S0, R)], [(S0, R)])
    found = mw.infer_backward("layer_norm", spec((8, 16), R, R), (16,), outputs=[spec((8, 16), S0, S1)])
    assert [s.layout.placements for s in found.inputs] == [(S0, R)]
    (entry,) = mw.rules("layer_norm")
    assert entry.notation == "... n0, n0, n0 -> ... n0"
    found = mw.infer_forward("layer_norm", spec((8, 16), S0, S1), (16,))
    assert [s.layout.placements for s in (*found.inputs, *found.outputs)] == [(S0, S1), (S0, S1)]
    assert 0 < found.bytes < 4 * 8 / 2 * 16 / 2  # less than to gather it


# ------------------------------------------------------------------------------------------ rules of the choice


@settings(max_examples=100, deadline=None)
@given(mesh=meshes([(4,), (2, 2), (2, 3)]), data=st.data())
def test_no_sharding_is_invented_and_bytes_are_those_of_the_plans(mesh, data):
    """Every split dim of an output comes from a split of an operand; replicated operands stay put for nothing."""
    a, b = data.draw(layouts(mesh, 2)), data.draw(layouts(mesh, 2))
    x, w = mw.Spec((12, 8), torch.float32, a), mw.Spec((6, 8), torch.float32, b)
    found = mw.infer_forward("linear", x, w)
    for axis in range(mesh.ndim):
        split = [isinstance(s.layout.placements[axis], Shard) for s in (x, w)]
        out = found.outputs[0].layout.placements[axis]
        if not any(split) and not any(isinstance(s.layout.placements[axis], Partial) for s in (x, w)):
            assert out == Replicate()
        if isinstance(out, Shard):
            assert any(split)
    assert found.bytes >= 0
    same = all(i.layout == s.layout for i, s in zip(found.inputs, (x, w), strict=True))
    if same and not any(isinstance(p, Replicate) for s in (x, w) for p in s.layout.placements):
        assert found.bytes == 0
    assert mw.infer_forward("linear", x, w) == found  # nothing but specs decides


def test_fewest_bytes_win():
    """The small operand moves to the large one."""
    ins, _ = forward("add", spec((64, 64), S0, mesh=FOUR), spec((64,), S0, mesh=FOUR))
    assert ins == [(S0,), (R,)]
    ins, _ = forward("linear", spec((4096, 8), S0, mesh=FOUR), spec((8, 8), S0, mesh=FOUR))
    assert ins == [(S0,), (R,)]
    found = mw.infer_forward("linear", spec((4096, 8), S0, mesh=FOUR), spec((8, 8), S0, mesh=FOUR))
    assert found.bytes == 2 * 3 / 4 * 8 * 8 * 4  # a gather, and the reduce-scatter of the gradient
    ins, outs = forward("linear", spec((8, 64), S0, mesh=FOUR), spec((4096, 64), S0, mesh=FOUR))
    assert ins == [(R,), (S0,)]
    assert outs == [(S1,)]
    # Of all that moves together, and not of the largest one: two of these are as many bytes as one is twice.
    a, b = spec((8, 8), S1, mesh=FOUR), spec((8, 8), S0, mesh=FOUR)
    ins, _ = forward("addcmul", a, b, b)
    assert ins == [(S0,)] * 3


def test_ties_keep_the_leftmost():
    ins, _ = forward("add", spec((8, 8), S0, mesh=FOUR), spec((8, 8), S1, mesh=FOUR))
    assert ins == [(S0,), (S0,)]
    ins, _ = forward("add", spec((8, 8), S1, mesh=FOUR), spec((8, 8), S0, mesh=FOUR))
    assert ins == [(S1,), (S1,)]


def test_one_factor_over_several_axes_in_the_order_of_the_operand():
    ordered = spec((16, 4), S0, S0, order={0: ["tp", "dp"]})
    found = mw.infer_forward("gelu", ordered)
    assert found.outputs[0].layout == ordered.layout
    found = mw.infer_forward("add", ordered, spec((16, 4), S0, S0))
    assert found.outputs[0].layout == ordered.layout
    found = mw.infer_forward("matmul", ordered, spec((4, 4), R, R))
    assert found.outputs[0].layout.dims == {0: ("tp", "dp")}


def test_uneven_splits_of_compound_dims_are_not_kept():
    """(10 over 4) x 3: shards of the product are not whole rows."""
    even = forward("view", spec((8, 3), S0, mesh=FOUR), (24,))
    assert even == ([(S0,)], [(S0,)])
    uneven = forward("view", spec((10, 3), S0, mesh=FOUR), (30,))
    assert uneven == ([(R,)], [(R,)])


def test_axes_are_chosen_together():
    """Alone, the first axis keeps the contracted dim in place and the second has to gather what it could exchange."""
    mesh = mw.Mesh({"a": 2, "b": 4})
    found = mw.infer_forward("matmul", spec((64, 32), S1, S0, mesh=mesh), spec((32, 48), R, S1, mesh=mesh))
    assert [s.layout.placements for s in found.inputs] == [(S1, S0), (S0, R)]
    assert found.outputs[0].layout.placements == (P, S0)


# ------------------------------------------------------------------------------------------ inference


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_inference_says_what_eager_does(data):
    """On two axes; for all ops on one see test_inference."""
    mesh = data.draw(st.sampled_from([mesh_of((4,)), mesh_of((2, 2))]))
    name = data.draw(st.sampled_from(["linear", "add", "matmul", "softmax", "sum", "gelu"]))
    shapes = {"linear": [(12, 8), (6, 8)], "add": [(12, 8), (12, 8)], "matmul": [(12, 8), (8, 6)]}.get(name, [(12, 8)])
    given_layouts = [data.draw(layouts(mesh, 2)) for _ in shapes]
    rest = {"softmax": (1,), "sum": (0,)}.get(name, ())
    fn = {"linear": F.linear, "softmax": F.softmax, "gelu": F.gelu}.get(name) or getattr(torch, name)
    found = mw.infer_forward(
        name, *[mw.Spec(s, torch.float64, p) for s, p in zip(shapes, given_layouts, strict=True)], *rest
    )

    def run():
        leaves = [ramp(*s).requires_grad_() for s in shapes]  # inference prices gradients
        tensors = [mw.shard_tensor(t, mesh, p, check=False) for t, p in zip(leaves, given_layouts, strict=True)]
        return fn(*tensors, *rest).spec.layout

    assert set(on_ranks(run, mesh)) == {found.outputs[0].layout}


def test_backward_inference_asks_inputs_for_what_outputs_should_have():
    found = mw.infer_backward("linear", spec((8, 16), R, R), spec((32, 16), R, R), outputs=[spec((8, 32), S0, S1)])
    assert [s.layout.placements for s in found.inputs] == [(S0, R), (R, S0)]
    assert found.outputs[0].layout.placements == (S0, S1)
    found = mw.infer_backward("gelu", spec((8, 16), R, R), outputs=[spec((8, 16), S1, S0)])
    assert [s.layout.placements for s in found.inputs] == [(S1, S0)]
    found = mw.infer_backward("transpose", spec((8, 16), R, R), 0, 1, outputs=[spec((16, 8), S0, R)])
    assert [s.layout.placements for s in found.inputs] == [(S1, R)]
    found = mw.infer_backward("sum", spec((8, 16), R, R), 0, outputs=[spec((16,), S0, R)])
    assert [s.layout.placements for s in found.inputs] == [(S1, R)]


def test_inference_of_what_has_no_rule():
    with pytest.raises(RuleError, match="'no_such_op' has no rule"):
        mw.infer_forward("no_such_op", spec((8,), R, R))
    with pytest.raises(RuleError, match=r"'gelu': give mw\.Spec\(shape, dtype, layout\) in place of each tensor"):
        mw.infer_forward("gelu", 3)
    with pytest.raises(MeshwrightError, match="linear"):
        mw.infer_forward("linear", spec((8, 16), R, R), spec((8, 17), R, R))


# ------------------------------------------------------------------------------------------ what it leads to


def test_a_transformer_block_talks_as_megatron_does():
    """Two all-reduces forward, two backward, on tp; nothing on dp but the parameters' gradients."""
    torch.manual_seed(0)
    d, heads = 16, 4

    def run():
        def made(*shape, **p):
            t = (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).cos() / 4).reshape(shape)
            return mw.shard_tensor(t, GRID, p, check=False).requires_grad_()

        qkv, out = made(3 * d, d, tp=S0), made(d, d, tp=S1)
        up, down = made(4 * d, d, tp=S0), made(d, 4 * d, tp=S1)
        norms = [made(d) for _ in range(4)]
        x = made(8, 6, d, dp=S0)
        h = x * 1.0
        with collective.counting() as forward_counts:
            a = F.layer_norm(h, (d,), norms[0], norms[1])
            q, k, v = F.linear(a, qkv).view(8, 6, heads, 3, d // heads).permute(3, 0, 2, 1, 4).unbind(0)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(8, 6, d)
            h = h + F.linear(a, out)
            a = F.layer_norm(h, (d,), norms[2], norms[3])
            h = h + F.linear(F.gelu(F.linear(a, up)), down)
            loss = (h * h).mean()
        with collective.counting() as backward_counts:
            loss.backward()
        return forward_counts.table, backward_counts.table, plain(x.grad)

    for ahead, back, _ in on_ranks(run, GRID):
        assert {k: n for k, (n, _) in ahead.items()} == {("all_reduce", ("tp",)): 2}
        assert {k: n for k, (n, _) in back.items()} == {("all_reduce", ("tp",)): 2}
