"""``mw.Precision(accumulate=)``: the dtype in which Partial activations, and gradients of activations, are summed."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn as nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import ProgramError, ShardError
from meshwright.explanation import explain_program
from meshwright.layout import spec_data, spec_from
from meshwright.program import Plan, build
from meshwright.program.check.verify import verify
from meshwright.program.ir.nodes import annotate, info_of

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TP = mw.Mesh({"tp": 4})
COLUMNS, ROWS, WHOLE = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}, {"tp": mw.Replicate()}
# Of four ranks 1, 2**-8, 2**-8 and 2**-8: bfloat16 rounds each sum back to 1, float32 keeps them, and rounds once.
PARTS, NARROW, WIDE = torch.tensor([[1.0, 2**-8, 2**-8, 2**-8]]), 1.0, 1 + 2**-6


def row(partial, **more):
    """A linear of ones whose output is Partial."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    return mw.shard_module(model, TP, {"weight": ROWS}, precision=mw.Precision(BF16, F32, partial), **more)


def parts():
    return mw.shard_tensor(PARTS, TP, ROWS)


def simulated(fn, mesh=TP):
    return mw.simulate(fn, mesh)[0]


USES = {
    "op": lambda y: y.relu(),
    "reshard": lambda y: mw.reshard(y, WHOLE),
    "unshard": mw.unshard,
    "item": lambda y: y.sum(),
    "linear op first": lambda y: (y * 2).T / 2,
    "view": lambda y: y.view(1, 1, 1)[0],
    "sum with another": lambda y: y + y * 0,
    "rest of it": lambda y: torch.cat([y, y])[1:],
    "average": lambda y: 4 * mw.reshard(y, {"tp": mw.Partial("avg")}) / 4,
    "cast there and back": lambda y: y.float().bfloat16(),
    "detached": lambda y: y.detach().clone(),
    "in place": lambda y: torch.zeros_like(y).add_(y),
    "again in place": lambda y: [torch.zeros_like(y).add_(y) for _ in range(3)][-1],
    "written": lambda y: mw.from_local(torch.zeros(1, 1, dtype=BF16), TP, {"tp": mw.Partial()}).add_(y),
    "written again": lambda y: [
        mw.from_local(torch.zeros(1, 1, dtype=BF16), TP, {"tp": mw.Partial()}).add_(y) for _ in range(3)
    ][-1],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_partial_activation_is_summed_in_partial_wherever_that_is(use, grad):
    def run(partial):
        with torch.set_grad_enabled(grad):
            y = row(partial)(parts())
        with torch.no_grad():  # outside of the model, and of its forward
            made = mw.unshard(use(y))
        assert made.dtype is BF16
        return float(made.flatten()[0])

    assert simulated(lambda: run(None)) == NARROW
    assert simulated(lambda: run(F32)) == WIDE
    assert simulated(lambda: run(BF16)) == NARROW


def test_it_is_rounded_once_where_several_steps_sum():
    """Reduce-scattered over one axis and all-reduced over another."""
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run(partial):
        model = nn.Linear(4, 2, bias=False)
        nn.init.ones_(model.weight)
        mw.shard_module(
            model, mesh, {"weight": {"dp": mw.Shard(1), "tp": mw.Shard(1)}}, precision=mw.Precision(BF16, F32, partial)
        )
        x = mw.shard_tensor(torch.tensor([[1.0, 2**-9, 2**-8, 0.0]]), mesh, {"dp": mw.Shard(1), "tp": mw.Shard(1)})
        with mw.explain() as why:
            made = mw.unshard(mw.reshard(model(x), {"dp": mw.Shard(1), "tp": mw.Replicate()}).detach())
        return float(made[0, 0]), why.records[0].dtypes

    value, dtypes = simulated(lambda: run(F32), mesh)
    assert value == 1 + 2**-7
    assert set(dtypes) == {"float32"}
    assert simulated(lambda: run(None), mesh) == (1.0, ("bfloat16",) * len(dtypes))


@pytest.mark.parametrize("static", [False, True], ids=["eager", "captured"])
def test_a_gradient_of_an_activation_is_summed_in_partial(static):
    """A replicated input of a column-parallel linear: each rank has its contribution to the gradient."""
    split, x = {"0.weight": ROWS, "2.weight": COLUMNS}, torch.full((1, 4), 0.25)

    def run(partial):
        precision = mw.Precision(BF16, F32, partial)
        model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.ReLU(), nn.Linear(1, 4, bias=False))
        nn.init.ones_(model[0].weight)
        model[2].weight.data = PARTS.T.clone()
        if static:
            step = mw.compile_step(
                model, lambda m, x: m(x).float().sum(), None, x, mesh=TP, gradients=True, layouts=split,
                precision=precision,
            )  # fmt: skip
            step(x)
            why = step.explain()
        else:
            mw.shard_module(model, TP, split, precision=precision)
            with mw.explain() as why:
                model(mw.shard_tensor(x, TP, ())).float().sum().backward()
        told = [(c.dtype, c.bytes) for c in why.collectives if c.tensor == "gradient of linear argument 0"]
        return told, float(mw.unshard(model[0].weight.grad)[0, 0])

    assert simulated(lambda: run(F32)) == ([("float32", 6)], WIDE / 4)
    assert simulated(lambda: run(None)) == ([("bfloat16", 3)], NARROW / 4)


def test_a_leaf_from_outside_gets_its_gradient_summed_in_partial():
    """Its first use makes its gradient Partial, and nobody of ours reduces it."""

    def run(partial):
        model = nn.Linear(1, 4, bias=False)
        model.weight.data = PARTS.T.clone()
        mw.shard_module(model, TP, {"weight": COLUMNS}, precision=mw.Precision(BF16, F32, partial))
        x = mw.shard_tensor(torch.ones(1, 1, dtype=BF16), TP, ()).requires_grad_()
        model(x).sum().backward()
        assert x.grad.placements == (mw.Partial(),)
        return float(mw.unshard(x.grad))

    assert simulated(lambda: run(F32)) == WIDE
    assert simulated(lambda: run(None)) == NARROW


def test_gradients_of_parameters_are_reduced_in_reduce_whatever_partial_says():
    def run(partial, reduce):
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        mw.shard_module(
            model, TP, {"1.weight": COLUMNS, "1.bias": COLUMNS}, precision=mw.Precision(BF16, reduce, partial)
        )
        free = mw.shard_module(nn.Linear(4, 4).bfloat16(), TP)  # of no precision, beside values that have one
        x = mw.shard_tensor(torch.randn(8, 4), TP, {"tp": mw.Shard(0)})
        with mw.explain() as why:
            free(model[0](x)).sum().backward()
        assert all(p.grad.dtype is p.dtype for p in (*model[0].parameters(), *free.parameters()))
        return why.counts.bytes

    base = simulated(lambda: run(None, BF16))
    assert simulated(lambda: run(F32, BF16)) == base
    assert simulated(lambda: run(F64, F32)) != base


# ------------------------------------------------------------------------------------------------ who inherits it


def test_the_widest_of_nested_modules_counts_from_there_on():
    policy = {"*": mw.Precision(BF16, F32, F32), "1": mw.Precision(BF16, F32, F64), "2": mw.Precision(BF16, F32)}

    def run():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        mw.shard_module(model, TP, {"*.weight": ROWS}, precision=policy)
        seen = []
        for m in model:
            m.register_forward_hook(
                lambda m, args, y: seen.append((args[0].spec.accumulate_dtype, y.spec.accumulate_dtype))
            )
        model(mw.shard_tensor(torch.ones(2, 4), TP, ()))
        return seen

    assert simulated(run) == [(None, F32), (F32, F64), (F64, F64)]


def test_what_has_no_rule_and_functions_of_the_users_keep_it():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def run():
        y = row(F32)(parts())
        return [
            t.spec.accumulate_dtype
            for t in (Double.apply(y), torch.cummax(y, 0)[0], y.argmax(), y > 0, torch.where(y > 0, y, 0))
        ]

    assert simulated(run) == [F32, F32, None, None, F32]


def test_specs_know_it():
    mesh = mw.Mesh({"x": 2})
    spec = mw.Spec((4,), BF16, mw.Layout(mesh, [mw.Partial()]), accumulate_dtype=F32)
    assert repr(spec) == "bfloat16[4] <x: Partial()>, summed in float32"
    assert spec.reduce_dtype is F32
    assert spec.grad().accumulate_dtype is F32
    assert spec.with_(dtype=F64).reduce_dtype is F64  # the wider one
    assert spec.with_(dtype=torch.complex64).reduce_dtype is torch.complex64
    assert spec.with_(dtype=F16).with_(dtype=BF16) is spec
    assert spec_from(spec_data(spec), mesh) is spec
    assert copy.deepcopy(spec) is spec
    assert mw.Spec((4,), torch.int64, mw.Layout(mesh), accumulate_dtype=F32).accumulate_dtype is None


def test_a_partial_kept_across_steps_and_saved_is_summed_alike():
    def run():
        model = row(F32)
        kept = torch.zeros(1, 1, dtype=BF16)
        for x in PARTS.T:  # the rest of the parts come from later steps
            kept = kept + model(mw.shard_tensor(x.expand(1, 4) / 4, TP, ROWS)).detach()
        file = io.BytesIO()
        torch.save(model(parts()).detach(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return kept.spec.accumulate_dtype, loaded.spec.accumulate_dtype, float(mw.unshard(loaded))

    assert simulated(run) == (F32, F32, WIDE)


# ------------------------------------------------------------------------------------------------ modes


class Net(nn.Module):
    """Norms, a tied embedding, and a block with a row- and a column-parallel linear."""

    def __init__(self, d=8, vocab=12, again=False):
        super().__init__()
        self.again = again
        self.embed, self.norm = nn.Embedding(vocab, d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight

    def block(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return self.head(x)


torch.manual_seed(0)
START, IDS = Net(), torch.randint(0, 12, (8, 6))
SPLIT = {"up.weight": COLUMNS, "up.bias": COLUMNS, "down.weight": ROWS}


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def dtypes_of(fn):
    """Dtype of each sum of floats that an op or a gradient of an activation implies."""
    with mw.explain() as why:
        fn()
    return [d for r in why.records for d, n in zip(r.dtypes, r.sums, strict=True) if n and d != "int64"]


@pytest.mark.parametrize("mode", ["plain", "checkpoint", "no_sync", "eval", "func", "stored", "tied"])
def test_modes(mode):
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run(partial):
        model = copy.deepcopy(START)
        model.again = mode == "checkpoint"
        policy = {"*": mw.Precision(BF16, F32, partial)}
        if mode == "tied":
            with pytest.raises(
                ShardError, match=r"tied\), and would be .*Partial in its own, and .*Partial in torch.float64"
            ):
                mw.shard_module(
                    copy.deepcopy(START),
                    mesh,
                    SPLIT,
                    precision={"*": mw.Precision(BF16, F32), "head": mw.Precision(BF16, F32, F64)},
                )
        stored = "dp" if mode == "stored" else None
        mw.shard_module(model, mesh, SPLIT, precision=policy, fsdp=stored)
        ids = mw.shard_tensor(IDS, mesh, {"dp": mw.Shard(0)})

        def train():
            if mode == "eval":
                with torch.no_grad():
                    return loss_of(model.eval(), ids)
            if mode == "func":
                return functional_call(model, {}, (ids,)).float().sum().backward()
            with mw.no_sync(model) if mode == "no_sync" else torch.enable_grad():
                return loss_of(model, ids).backward()

        return dtypes_of(train)

    made, before = simulated(lambda: run(F64), mesh), simulated(lambda: run(None), mesh)
    assert set(made) == {"float64"}
    assert len(made) == len(before)
    assert "bfloat16" in before


def test_captured_steps_sum_alike_and_a_program_that_does_not_is_refused():
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run(partial):
        step = mw.compile_step(
            copy.deepcopy(START), loss_of, None, IDS, mesh=mesh, batch={"dp": mw.Shard(0)}, layouts=SPLIT,
            precision=mw.Precision(BF16, BF16, partial), passes=["data-parallel-optimization"],
        )  # fmt: skip
        why = step.explain()
        with mw.explain() as ran:
            step(IDS)
        assert ran.counts.table == why.counts.table
        return step.program, [c for c in why.collectives if c.axes == ("tp",) and c.kind == "all_reduce"]

    program, sums = simulated(lambda: run(F32), mesh)
    assert {c.dtype for c in sums} == {"float32"}
    assert {c.dtype for c in simulated(lambda: run(None), mesh)[1]} == {"bfloat16"}
    verify(program)
    for node in list(program.graph.nodes):  # without the casts around it, all that follows fits
        if node.name == next(c.node for c in sums):
            narrow, (after,) = node.args[0].args[0], node.users
            node.replace_input_with(node.args[0], narrow)
            after.replace_all_uses_with(node)
            annotate(node, value=info_of(after).value)
            program.graph.erase_node(after)
            break
    with pytest.raises(ProgramError, match=r"sums in bfloat16; the conversion .* sums in float32"):
        verify(program)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ShardError, match=r"accumulate=torch.int32: one of torch.float16"):
        mw.Precision(accumulate=torch.int32)

    def again():
        mw.shard_module(row(F32), TP, precision=mw.Precision(BF16, F32, F64))

    with pytest.raises(ShardError, match=r"sharded already, computed in .*Partial in torch.float32: say precision="):
        simulated(again)


def test_parameters_of_the_dtype_that_they_are_computed_in_have_partial_too():
    def run():
        model = nn.Linear(4, 1, bias=False, dtype=BF16)
        nn.init.ones_(model.weight)
        mw.shard_module(model, TP, {"weight": ROWS}, precision=mw.Precision(accumulate=F32))
        y = model(parts().bfloat16())
        y.sum().backward()
        assert model.weight.grad.dtype is BF16
        return float(mw.unshard(y.detach()))

    assert simulated(run) == WIDE


# ------------------------------------------------------------------------------------------------ warnings


def test_sums_of_many_ranks_in_few_bits_are_named():
    mesh = mw.Mesh({"tp": 16})

    def run(static, **dtypes):
        model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))
        split = {"0.weight": COLUMNS, "0.bias": COLUMNS, "1.weight": ROWS}
        precision = mw.Precision(**dtypes)
        if static:
            plan = Plan(layouts=split, precision=precision)
            built = build(model, lambda m, x: m(x).float().square().sum(), None, torch.ones(16, 4), mesh, plan, rank=3)
            why = explain_program(built.program)
        else:
            mw.shard_module(model, mesh, split, precision=precision)
            with mw.explain() as why:
                model(mw.shard_tensor(torch.ones(16, 4), mesh, ())).float().square().sum().backward()
        text = why.text(200)
        assert [str(w) in str(why) and str(w) in text for w in why.warnings] == [True] * len(why.warnings)
        assert why.to_dict()["warnings"] == [dict(vars(w), axes=["tp"]) for w in why.warnings]
        return [(w.kind, w.dtype, w.ranks) for w in why.warnings]

    for static in (False, True):
        found = (lambda fn: fn()) if static else lambda fn: simulated(fn, mesh)
        assert found(lambda s=static: run(s, compute=BF16)) == [("all_reduce", "bfloat16", 16)]
        assert found(lambda s=static: run(s, compute=BF16, accumulate=F32)) == []
    assert simulated(lambda: run(False, compute=F16), mesh) == []  # it has 11 bits


def test_gradients_that_many_ranks_sum_in_few_bits_are_named():
    mesh = mw.Mesh({"dp": 9})

    def run(reduce):
        model = mw.shard_module(nn.Linear(4, 4), mesh, precision=mw.Precision(BF16, reduce))
        with mw.explain() as why:
            model(mw.shard_tensor(torch.ones(9, 4), mesh, {"dp": mw.Shard(0)})).sum().backward()
        return [str(w) for w in why.warnings]

    assert simulated(lambda: run(F32), mesh) == []
    (told,) = simulated(lambda: run(BF16), mesh)
    assert told.startswith("warning: gradients of parameters: all_reduce over dp sums 9 ranks in bfloat16")
