"""Checks of programs: each by one that is wrong in one place, and the words that say so; and what they let pass."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
from torch.fx.experimental.proxy_tensor import make_fx

import meshwright as mw
from meshwright.collective import Fact
from meshwright.errors import DesyncError, ProgramError
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.passes import PassManager
from meshwright.program import Plan, Program, build
from meshwright.program.check.facts import numbers, program_facts
from meshwright.program.check.verify import verify, verify_together
from meshwright.program.ir.nodes import Value, annotate, checked_value, info_of
from meshwright.program.ir.program import WHOLE

MESH = mw.Mesh({"dp": 2, "tp": 2})
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
F32, F64 = torch.float32, torch.float64
aten, ops = torch.ops.aten, torch.ops.meshwright


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
        return mw.constrain(self.down(torch.tanh(self.up(x))), {"dp": S0, "tp": S1}) * 2


def program_of(rank: int, rows: int = 4) -> Program:
    model = Net().to("meta")
    plan = Plan({"up.weight": {"tp": S0}, "up.bias": {"tp": S0}, "down.weight": {"tp": S1}}, {"dp": S0})
    optimizer = torch.optim.AdamW(model.parameters())
    return build(
        model, lambda m, x: m(x).square().mean(), optimizer, torch.zeros(rows, 6), MESH, plan, rank=rank
    ).program


ALL = [program_of(rank) for rank in MESH.ranks]
INPUTS = [(i.kind, i.name) for i in ALL[0].inputs]


def fresh(program: Program = ALL[0]) -> Program:
    """A copy that may be changed."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return replace(program, graph=graph)


def the(p: Program, op: Any, number: int = 0) -> fx.Node:
    return [n for n in p.graph.nodes if n.target is op][number]


def arg(node: fx.Node, i: int, value: Any) -> None:
    given = list(node.args)
    given[i] = value
    node.args = tuple(given)


def given(p: Program, kind: str, name: str, /, **changes: Any) -> Program:
    """With another description of an input."""
    i = INPUTS.index((kind, name))
    return replace(p, inputs=(*p.inputs[:i], replace(p.inputs[i], **changes), *p.inputs[i + 1 :]))


def place(p: Program, kind: str, name: str) -> fx.Node:
    return p.placeholders[INPUTS.index((kind, name))]


def spec_of(p: Program, kind: str, name: str) -> Spec:
    found = p.inputs[INPUTS.index((kind, name))].spec
    assert found is not None
    return found


def value(node: fx.Node, **changes: Any) -> None:
    annotate(node, value=replace(checked_value(node), **changes))


def insert(after: fx.Node, target: Any, args: Any, made: Any, **info: Any) -> fx.Node:
    """Another op of a role, forward if nothing is said."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, args)
    annotate(node, **{"role": "forward", "value": made, **info})
    return node


def caused(p: Program, i: int, **changes: Any) -> Program:
    causes = list(p.causes)
    causes[i] = replace(causes[i], **changes)
    return replace(p, causes=tuple(causes))


def layout(*placements: Any) -> Layout:
    return Layout(MESH, placements, ndim=2)


def fused(p: Program) -> fx.Node:
    return the(p, aten._fused_adamw_.tensor_lr)


def gradient(p: Program, i: int, node: fx.Node) -> None:
    """The update of the i-th parameter reads another value."""
    listed = list(fused(p).args[1])  # type: ignore[arg-type]
    listed[i] = node
    arg(fused(p), 1, listed)


def largest(p: Program, two: Any = None, of: Any = None) -> fx.Node:
    """max over a dim, which gives two values."""
    of = the(p, aten.tanh.default) if of is None else of
    two = (Value((2,), checked_value(of).dtype, 900, 16), Value((2,), torch.int64, 901, 16)) if two is None else two
    return insert(of, aten.max.dim, (of, 0), two)


def double(p: Program) -> fx.Node:
    tanh = the(p, aten.tanh.default)
    made = insert(tanh, aten._to_copy.default, (tanh,), checked_value(tanh).fresh(910, F64))
    made.kwargs = {"dtype": F64}
    return made


def gradients_by_name(p: Program, listed: list[fx.Node]) -> None:
    """An update in front of the update, whose lists are given by name."""
    node = insert(the(p, AR, 3), aten._foreach_add_.List, (entries(p),), None, role="backward")
    node.kwargs = {"other": listed}


def picked(p: Program, i: int, **changes: Any) -> None:
    source = largest(p)
    made = replace(info_of(source).value[0], **changes)  # type: ignore[index]
    insert(source, operator.getitem, (source, i), made)


def added(p: Program, where: str, kind: str, name: str) -> None:
    """Something is added to an input in place."""
    node = place(p, kind, name)
    insert(the(p, aten.tanh.default), aten.add_.Tensor, (node, 1), checked_value(node), role=where)


def many(p: Program, columns: int) -> None:
    """A value of many columns in the memory of one, and the columns."""
    tanh = the(p, aten.tanh.default)
    part = insert(tanh, aten.slice.Tensor, (tanh, 1, 0, 1), replace(checked_value(tanh), shape=(2, 1), given=(2, 1)))
    lain = replace(checked_value(part), shape=(2, columns), given=(2, 0))
    wide = insert(part, aten.expand.default, (part, [2, columns]), lain)
    insert(wide, aten.split.Tensor, (wide, 1, 1), ())


def entries(p: Program) -> list[fx.Node]:
    """The gradients of the update."""
    return list(fused(p).args[1])  # type: ignore[arg-type]


Change = Callable[[Program], Any]
RS, AG, AR = ops.reduce_scatter.default, ops.all_gather.default, ops.all_reduce.default
UP, ON = ("param", "up.weight"), "dp=2,tp=2@cpu"

# What is changed, and what is said of it; None: nothing, it is well formed.
Table = list[tuple[Change, str | None]]
INTERFACE: Table = [
    (lambda p: replace(p, inputs=p.inputs[1:]), "the graph has 19 inputs, the program lists 18"),
    (lambda p: replace(p, outputs=p.outputs * 2), "the graph gives 1 results, the program lists 2 outputs"),
    (lambda p: given(p, *UP, kind="weight"), r"input weight up.weight \(%p_.*\): its kind is one of param, buffer"),
    (lambda p: annotate(place(p, *UP), value=None), r"param up.weight .*: its shape and dtype are not recorded"),
    (
        lambda p: given(p, *UP, spec=spec_of(p, *UP).with_(layout=layout(R, R))),
        r"means \[4, 6\] on the rank at \(0, 0\), but the value has shape \[2, 6\]",
    ),
    (
        lambda p: given(p, *UP, spec=spec_of(p, *UP).with_(dtype=F64)),
        "the layout is that of torch.float64, the value is torch.float32",
    ),
    (lambda p: given(p, "buffer", "seen", kind="accumulator", spec=Spec((), F64, Layout(MESH))), None),
    (
        lambda p: given(p, "buffer", "seen", kind="accumulator", spec=Spec((4,), F64, Layout(MESH))),
        r"means \[4\] on the rank at \(0, 0\), but the value has shape \[\]",
    ),
    (lambda p: given(p, "batch", "batch", spec=None), None),
    (
        lambda p: given(p, "state", "up.weight.step", owner="seen"),
        r"state up.weight.step .* belongs to 'seen', which is no parameter of the program",
    ),
    (lambda p: given(p, "batch", "batch", kind="constant", name="c"), "the program does not hold this constant"),
    *(
        (lambda p, held=held: replace(given(p, "batch", "batch", kind="constant", name="c"), constants={"c": held}), w)
        for held, w in (
            (torch.zeros(2, 6), None),
            (torch.zeros(2, 6, dtype=F64), r"is said to be torch.float32 \[2, 6\], it is torch.float64 \[2, 6\]"),
            (torch.zeros(6, 2), r"is said to be torch.float32 \[2, 6\], it is torch.float32 \[6, 2\]"),
            (3.0, "does not hold this constant"),
        )
    ),
    (
        lambda p: given(p, "state", "up.bias.step", name="up.weight.step"),
        "input state up.weight.step is listed twice",
    ),
    (
        lambda p: next(iter(p.graph.find_nodes(op="output"))).replace_input_with(p.results[0], fused(p)),
        r"output loss loss .*: not one tensor",
    ),
    (
        lambda p: replace(p, outputs=(replace(p.outputs[0], spec=Spec((4,), F32, Layout(MESH))),)),
        r"output loss loss .*: .* means \[4\]",
    ),
    (
        lambda p: replace(p, outputs=(replace(p.outputs[0], spec=Spec((), F64, Layout(MESH))),)),
        "the layout is that of torch.float64",
    ),
    (lambda p: replace(p, parts={"one": fresh()}, schedules={"step": ("one", WHOLE)}), None),
    (lambda p: replace(p, parts={"one": replace(p, inputs=p.inputs[1:])}), "the part one: the graph has 19 inputs"),
    (lambda p: replace(p, schedules={"step": ("one",)}), "the schedule step runs one, which is no part"),
    (lambda p: replace(p, parts={"one": fresh()}, schedules={"s": ()}), "the schedule s runs nothing"),
]
NODES: Table = [
    (
        lambda p: p.graph.inserting_after(the(p, aten.tanh.default)) and p.graph.call_method("neg", ()),
        "is a call_method",
    ),
    (lambda p: annotate(the(p, aten.tanh.default), role="middle"), "has the role 'middle': one of forward"),
    (lambda p: annotate(the(p, aten.tanh.default), value=None), "%tanh.*: what it gives is not recorded"),
    (lambda p: annotate(the(p, aten.tanh.default), cause=7), "serves conversion 7; there are 7"),
    (lambda p: annotate(the(p, aten.tanh.default), cause=-1), "serves conversion -1"),
    (lambda p: annotate(the(p, aten.tanh.default), cause=0), None),
    (lambda p: annotate(the(p, aten.tanh.default), spec=Spec((4, 4), F32, layout(R, R))), r"%tanh.* means \[4, 4\]"),
    (lambda p: added(p, "backward", *UP), r"which is part of the backward, writes to param up.weight"),
    (lambda p: added(p, "optimizer", *UP), None),
    (lambda p: added(p, "forward", *UP), "part of the forward, writes to param up.weight"),
    (lambda p: added(p, "forward", "state", "up.weight.step"), "part of the forward, writes to state up.weight.step"),
    (lambda p: added(p, "optimizer", "hyper", "lr.0"), "part of the optimizer, writes to hyper lr.0"),
    (lambda p: added(p, "recomputation", "buffer", "seen"), None),
    (lambda p: added(p, "forward", "batch", "batch"), None),
    (lambda p: added(p, "backward", "batch", "batch"), "part of the backward, writes to batch batch"),
    (lambda p: (added(p, "forward", *UP), annotate(the(p, aten.add_.Tensor, 1), writes=True)), None),
    (
        lambda p: (added(p, "backward", *UP), annotate(the(p, aten.add_.Tensor, 1), writes=True)),
        "part of the backward, writes to param up.weight",
    ),
    # -- what ops give
    (
        lambda p: arg(the(p, aten.mm.default), 1, the(p, aten.mm.default).args[0]),
        r"its arguments do not fit: a and b .*\[2, 6\] X",
    ),
    (
        lambda p: value(the(p, aten.mm.default), shape=(1, 1)),
        r"is said to give float32\[1, 1\], but .* float32\[2, 2\]",
    ),
    (lambda p: value(the(p, aten.mm.default), dtype=F64), r"is said to give float64\[2, 2\], but .* float32\[2, 2\]"),
    (lambda p: value(the(p, aten.mm.default), given=(1, 2)), r"memory with strides \[1, 2\], but .* with \[2, 1\]"),
    (
        lambda p: value(the(p, aten.t.default), storage=999),
        "is a view of p_model_up_weight, but is said to have memory",
    ),
    (lambda p: largest(p), None),
    (lambda p: largest(p, two=(Value((2,), F32, 900, 8), None)), r"said to give nothing, and gives int64\[2\]"),
    (lambda p: largest(p, two=Value((2,), F32, 900, 8)), "gives 2 values, not the 1 that it is said to"),
    (lambda p: largest(p, of=double(p)), None),  # of float64, as it is given
    (lambda p: gradients_by_name(p, entries(p)), None),
    (lambda p: gradients_by_name(p, entries(p)[1:]), "3 tensors in other for 4 in self"),
    (lambda p: picked(p, 0), None),
    (lambda p: picked(p, 2), "picks value 2 of max_dim, which does not give that many"),
    (lambda p: picked(p, -1), "picks value -1 of max_dim"),
    (lambda p: picked(p, 1), r"is said to be float32\[2\], but value 1 of max_dim is int64\[2\]"),
    (lambda p: picked(p, 0, shape=(3,)), r"is said to be float32\[3\], but value 0 of max_dim is float32\[2\]"),
    (
        lambda p: insert(
            the(p, aten.tanh.default),
            aten.as_strided.default,
            (the(p, aten.tanh.default), [2], [1]),
            replace(checked_value(the(p, aten.tanh.default)), shape=(2,)),
        ),
        None,
    ),
    (
        lambda p: insert(
            the(p, aten.tanh.default),
            aten.as_strided.default,
            (the(p, aten.tanh.default), [3], [1]),
            replace(checked_value(the(p, aten.tanh.default)), shape=(2,)),
        ),
        r"is said to give float32\[2\], but .* float32\[3\]",
    ),
    (lambda p: many(p, 1 << 21), "%split_tensor.*: its arguments do not fit: it would give 2097152 tensors"),
    (lambda p: many(p, 3), "%split_tensor .* gives 3 values, not the 0 that it is said to"),
    (lambda p: arg(fused(p), 1, fused(p).args[1][1:]), "3 tensors in grads for 4 in self"),  # type: ignore[index]
    (
        lambda p: arg(fused(p), 1, fused(p).args[1][::-1]),
        r"in grads has shape \[6\], p_model_up_weight in self \[2, 6\]",
    ),  # type: ignore[index]
]
COLLECTIVES: Table = [
    (lambda p: arg(the(p, AR), -1, "dp=4@cpu"), f"runs on the mesh dp=4@cpu, the program is of {ON}"),
    (lambda p: arg(the(p, AR), 2, "pp"), "runs over the axes 'pp'; .* has dp, tp"),
    (lambda p: arg(the(p, AR), 2, "dp,dp"), "runs over the axes 'dp,dp'"),
    (lambda p: arg(the(p, AR), 1, "xor"), "the reduction 'xor' is none of sum, avg"),
    (lambda p: arg(the(p, RS), 3, [3, 2, 1]), r"3 sizes \[3, 2, 1\] for the 2 ranks of its group"),
    (lambda p: arg(the(p, RS), 3, [3, 4]), r"sizes \[3, 4\] want 7 in dim 1 of rank 0; it has 6"),
    (lambda p: arg(the(p, RS), 4, 1), "given index 1 in its group; this rank has index 0"),
    (lambda p: arg(the(p, AG), 2, [4, 2]), r"sizes \[4, 2\] want 4 in dim 1 of rank 0; it has 3"),
    (lambda p: arg(the(p, AR), 2, "tp"), "runs over tp; the conversion .* of gradient of up.weight is over dp"),
    (lambda p: arg(the(p, AR), 1, "max"), "reduces by max; the conversion .* is a reduction by sum"),
    (lambda p: annotate(the(p, AG), cause=1), "the conversion .* of reshard consists of reduce_scatter"),
    (lambda p: caused(p, 3, dtypes=("bfloat16",)), "sums in float32; the conversion .* sums in bfloat16"),
    (lambda p: caused(p, 2, dtypes=("bfloat16",)), None),  # a gather sums nothing
    (lambda p: caused(p, 2, src=layout(R, S0)), r"joins dim 1; the conversion .* is about dim 0"),
    (lambda p: caused(p, 1, dst=layout(R, S0)), r"splits dim 1; the conversion .* is about dim 0"),
    (lambda p: caused(p, 2, src="several"), None),
    (lambda p: caused(p, 0, kinds=("all_to_all",)), "no all_to_all is left of the conversion .* of linear"),
    (lambda p: caused(p, 3, kinds=("all_reduce", "all_gather")), "no all_gather is left of the conversion"),
    (lambda p: caused(p, 3, kinds=("all_gather",)), "consists of all_gather"),
    (lambda p: caused(p, 3, kinds=()), "consists of no communication"),
    (lambda p: caused(p, 3, src=layout(Partial("avg"), S0)), None),  # a sum with a factor
    (lambda p: caused(p, 3, src=layout(Partial("any"), S0)), "reduces by sum; the conversion .* reduction by any"),
    *((lambda p, op=op: caused(p, 3, src=layout(Partial(op), S0)), None) for op in ("max", "min", "product")),
    (lambda p: caused(p, 3, src=layout(Partial("max"), S0), kinds=("reduce_scatter",)), None),  # those that hold it
]


def backward(after: fx.Node, target: Any, *args: Any, made: Any = None) -> fx.Node:
    """Another op of the backward: what it gives is as its first argument, in memory of its own, or ``made``."""
    return insert(after, target, args, made or checked_value(args[0]).fresh(970), role="backward")


def other_gradient(p: Program, *more: fx.Node) -> None:
    """up.weight gets what is down.weight's, turned round (and its own beside)."""
    source = the(p, AR, 2)
    turned = replace(checked_value(source), shape=(2, 6), given=(1, 2))
    made = backward(source, aten.t.default, source, made=turned)
    if more:
        made = backward(made, aten.add.Tensor, made, *more, made=Value((2, 6), F32, 950, 48, (1, 2)))
    gradient(p, 0, made)


def written(p: Program, target: Any, into: Any, *args: Any) -> None:
    """Something is written behind the reductions, and up.weight's update reads where it was written."""
    lists = isinstance(into, list)
    gradient(p, 0, into[0] if lists else into)
    made = None if lists else checked_value(into)
    insert(the(p, AR, 3), target, (into, *args), made, role="backward")


def local(p: Program, number: int = 0) -> Any:
    """A gradient before its reduction."""
    return the(p, AR, number).args[0]


def copied_weight(p: Program) -> None:
    """The update writes to the weight through a view of it."""
    weight = place(p, *UP)
    made = insert(the(p, AR, 3), aten.detach.default, (weight,), checked_value(weight), role="optimizer")
    arg(fused(p), 0, [made, *list(fused(p).args[0])[1:]])  # type: ignore[arg-type]
    gradient(p, 0, local(p))


def returned(p: Program, node: fx.Node, *placements: Any) -> Program:
    """A gradient as the result."""
    next(iter(p.graph.find_nodes(op="output"))).replace_input_with(p.results[0], node)
    spec = Spec((4, 6), F32, layout(*placements)) if placements else None
    return replace(p, outputs=(replace(p.outputs[0], kind="grad", name="up.weight", spec=spec),))


UNSUMMED = "the update of up.weight, gets a gradient of up.weight that is not summed over dp"
FLOW: Table = [
    (lambda p: gradient(p, 0, local(p)), UNSUMMED),
    (copied_weight, UNSUMMED),
    (lambda p: written(p, aten.mul_.Tensor, the(p, AR), 0.5), None),
    (lambda p: written(p, aten.add_.Tensor, the(p, AR), local(p)), UNSUMMED),
    (lambda p: written(p, aten.copy_.default, the(p, AR), local(p)), UNSUMMED),
    (lambda p: written(p, aten.copy_.default, local(p), the(p, AR)), None),  # replaces all that was there
    (lambda p: written(p, aten.add_.Tensor, local(p), the(p, AR)), UNSUMMED),
    (lambda p: written(p, aten._foreach_mul_.Scalar, [the(p, AR), the(p, AR, 1)], 0.5), None),
    (
        lambda p: written(p, aten._foreach_add_.List, [the(p, AR), the(p, AR, 1)], [the(p, AR), local(p, 1)]),
        "the update of up.bias, gets a gradient of up.bias that is not summed over dp",
    ),
    (lambda p: written(p, aten._foreach_add_.List, [the(p, AR)], [local(p)]), UNSUMMED),
    (
        lambda p: gradient(p, 2, the(p, AR, 2).args[0]),  # type: ignore[arg-type]
        "a gradient of down.weight that is not summed over dp: no reduction lies between %t_default_5",
    ),
    (lambda p: other_gradient(p), "gets %t_default_9 as gradient of up.weight; it is that of down.weight"),
    (lambda p: other_gradient(p, the(p, AR)), None),
    (lambda p: gradient(p, 3, the(p, ops.keep_one.default)), "as gradient of down.bias; it is not one that autograd"),
    (lambda p: returned(p, the(p, AR)), None),
    (lambda p: returned(p, the(p, AR).args[0]), "output grad up.weight .* not summed over dp"),  # type: ignore[arg-type]
    (lambda p: returned(p, the(p, AR).args[0], P, S0), None),  # type: ignore[arg-type]
    (lambda p: returned(p, the(p, AR).args[0], R, S0), "not summed over dp"),  # type: ignore[arg-type]
    (lambda p: returned(p, the(p, aten.tanh.default)), "it is not one that autograd gave"),
    *(
        (lambda p, name=name, spec=spec: annotate(the(p, AR).args[0], grad_of=((name, spec),)), words)
        for name, spec, words in (
            ("up.bias", Spec((4, 6), F32, layout(P, S0)), r"of shape \[4, 6\]; the parameter has shape \[4\]"),
            ("up.weight", Spec((4, 6), F32, layout(P, R)), r"means \[4, 6\]; it has \[2, 6\]"),
            ("up.weight", Spec((4, 6), F32, layout(P, S0)), None),
            ("up.weight", Spec((4, 6), F32, layout(R, S0)), None),
        )
    ),
]


@pytest.mark.parametrize("table", [INTERFACE, NODES, COLLECTIVES + FLOW], ids=["interface", "nodes", "meetings"])
def test_what_is_wrong_is_named(table: Table) -> None:
    looked_at(table, ALL[0])


def looked_at(table: Table, base: Program) -> None:
    for i, (change, words) in enumerate(table):
        p = fresh(base)
        made = change(p)
        p = made if isinstance(made, Program) else p
        if words is None:
            verify(p)
            continue
        print(i, words)  # the last one is what is not noticed
        with pytest.raises(ProgramError, match=words):
            verify(p)


def test_gradients_that_are_summed_together_or_over_micro_steps() -> None:
    """In a buffer: what is read in front of the sum is not summed; in the sums of a merge neither."""
    view, start = aten.as_strided.default, ops.all_reduce_start.default

    def early(p: Program) -> None:
        part = the(p, view, 3)
        gradient(p, 0, backward(the(p, start).prev, aten.clone.default, part))

    fused_sums: Table = [
        (lambda p: None, None),
        (lambda p: gradient(p, 0, the(p, view, 3)), None),  # which holds the sum by then
        (early, UNSUMMED),
    ]
    merged: Table = [
        (lambda p: None, None),
        (lambda p: gradient(p, 0, local(p)), UNSUMMED),
        (lambda p: gradient(p, 0, next(n for n in p.placeholders if n.name == "sum_up_weight")), UNSUMMED),
    ]
    for table, passes in (
        (fused_sums, "data-parallel-optimization:bucket_bytes=1000000,prune=no"),
        (merged, "gradient-merge:k_steps=2,weighted=false"),
    ):
        looked_at(table, PassManager([passes])(ALL[0]))


def test_all_ranks() -> None:
    verify_together(ALL[::-1])
    for some, words in (
        (ALL[:3], "one program for each rank of one mesh was expected, not rank 0 of .*, rank 1 of"),
        ([*ALL[:3], ALL[0]], "one program for each rank"),
        ([*ALL, ALL[0]], "one program for each rank"),
        ([*ALL[:3], replace(ALL[3], mesh=mw.Mesh({"dp": 4}))], "one program for each rank"),
        ([*ALL[:3], replace(ALL[3], inputs=ALL[3].inputs[1:])], "rank 3: the graph has 19 inputs"),
    ):
        with pytest.raises(ProgramError, match=words):
            verify_together(some)
    with pytest.raises(DesyncError, match=r"rank 3 brings shape \[2, 6\], rank 2 \[4, 6\]"):
        verify_together([*ALL[:2], program_of(2, rows=8), ALL[3]])
    last = fresh(ALL[2])
    the(last, AR, 1).append(the(last, AR, 0))
    with pytest.raises(DesyncError, match="rank 2"):
        verify_together([*ALL[:2], last, ALL[3]])


def test_what_one_rank_keeps_somebody_keeps() -> None:
    for keeps, right in (
        ((1, 0, 1, 0), True), ((1, 0, 0, 0), True), ((0, 0, 0, 0), False), ((1, 1, 1, 0), False),
        ((1, 1, 1, 1), False),
    ):  # fmt: skip
        programs = [fresh(p) for p in ALL]
        for p, one in zip(programs, keeps, strict=True):
            arg(the(p, ops.keep_one.default), 1, bool(one))
        if right:
            verify_together(programs)
        else:
            with pytest.raises(DesyncError, match=f"{sum(keeps)} of 4 ranks keep the value; one of each group must"):
                verify_together(programs)
    programs = [fresh(p) for p in ALL]
    one = the(programs[1], ops.keep_one.default)
    one.replace_all_uses_with(one.args[0])  # type: ignore[arg-type]
    programs[1].graph.erase_node(one)
    with pytest.raises(DesyncError, match="some ranks keep a value"):
        verify_together(programs)


def test_what_ranks_have_alike() -> None:
    found = program_facts(ALL[1])
    assert [f.text for f in found[: len(INPUTS)]] == [f"input {kind} {name}" for kind, name in INPUTS]
    assert found[len(INPUTS) :] == [
        Fact("reduce_scatter['sum', 1, 'tp'] of torch.float32", "[[3, 3]]", 0),
        Fact("all_gather[1, 'tp'] of torch.float32", "[[3, 3]]", 0),
        *[Fact("all_reduce['sum', 'dp'] of torch.float32", "[]", 1)] * 4,
        Fact("output loss loss"),
    ]
    assert program_facts(ALL[1], inputs=False) == found[len(INPUTS) :]
    parts = program_facts(replace(ALL[1], parts={"one": ALL[1]}, schedules={"step": ("one",)}))
    assert parts[len(found) :] == [Fact("the part one"), *found[len(INPUTS) :], Fact("schedules {'step': ('one',)}")]


def test_numbers_that_ranks_have_alike() -> None:
    """Options of updates and numbers in graphs as every process writes them: no values of tensors, no addresses."""
    traced = make_fx(lambda x: torch.add(x, 2.5, alpha=3).to(F64).clamp(0, None))(torch.zeros(2))
    given = {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "held": torch.zeros(1)}
    update = Fact("an update with (('lr', 0.1), ('betas', (0.9, 0.99)), ('foreach', None), ('held', Tensor))")
    assert numbers([given]) == [update]
    assert numbers([given], traced) == [
        update,
        Fact("aten.add.Tensor(Node, 2.5, ('alpha', 3))"),
        Fact("aten._to_copy.default(Node, ('dtype', torch.float64))"),
        Fact("aten.clamp.default(Node, 0)"),
    ]
