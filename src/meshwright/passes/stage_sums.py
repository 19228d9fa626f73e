"""Sums of gradients of a pipeline: what each stage contributes, and what it reduces behind its last backward.

A parameter that several stages use (a tied weight) has a sum at each of them, of what that stage contributes; they are
brought together once.  What reduces the gradients of a stage's parameters over ranks is a part of its own, ``R``: it
runs when the stage has done its last backward, while others still compute.  The update divides what was reduced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from ..collective import COLLECTIVES
from ..layout import At, Spec
from ..program.ir.edit import Edit
from ..program.ir.inplace import storages
from ..program.ir.nodes import UPDATE, NodeInfo, annotate, checked_value, info_of, is_mutating, is_sum
from ..program.ir.program import Input, Message, Output, Program
from ..program.ir.schedules import StagePart
from ..program.ir.subgraphs import of_forward, read_instead
from .batch_weights import UPDATE_WEIGHTS
from .gradient_merge import Contributions, SumsUpdate, before_reduction

aten = torch.ops.aten
_SUMS = NodeInfo("backward", source="sums of stages")
# What is done to a gradient as autograd gave it: it is cast, and cut to what its stage has.
_KEPT = {aten._to_copy.default, aten.slice.Tensor, aten.clone.default}


# ---------------------------------------------------------------------------------------------- contributions


def stages_of(program: Program) -> dict[str, int]:
    """The stages of parameters that lie at one: all but numbers, which are on all ranks."""
    axis = program.mesh.axis_index(program.stages)
    pairs = zip(program.placeholders, program.inputs, strict=True)
    lie = [(i.name, info_of(n).stage) for n, i in pairs if i.kind == "param" and i.spec is not None
           and isinstance(i.spec.layout.placements[axis], At)]  # fmt: skip
    return {name: stage for name, stage in lie if stage is not None}


def contributions(program: Program, whole_sums: bool) -> Contributions:
    """Let the gradient of a parameter to which other stages contribute than the one that has it be the sum of what each
    stage contributes, and say which nodes these are.

    Args:
        program: whose graph is changed.
        whole_sums: whether gradients are summed over micro-batches before they are scattered.
    """
    homes = stages_of(program)
    edit = Edit(program.graph, program.mesh.device)
    _separate(edit, homes)
    stages, made = _stages(program), dict[fx.Node, Mapping[int, fx.Node]]()
    for node in [n for n in program.graph.nodes if info_of(n).grad_of]:
        home = homes.get(info_of(node).grad_of[0][0])
        if home is None:
            continue
        node = _cut_behind(edit, node)
        behind, root = _joined(before_reduction(node, whole_sums), whole_sums)
        terms = list(_terms(root))
        of: dict[int, list[fx.Node]] = {}
        for term in terms:
            found = stages.get(term)
            of.setdefault(home if found is None else found, []).append(term)
        if set(of) == {home}:
            continue
        each = {stage: _added(edit, of[stage], stage) for stage in sorted(of, reverse=True)}
        for one in behind:
            each = {stage: _again(edit, one, term, stage) for stage, term in each.items()}
        for stage, term in each.items():
            annotate(term, stage=stage)
        end = behind[-1] if behind else root
        total = _added(edit, list(each.values()), home)
        if total is not end:
            read_instead(list(end.users), {end: total})
            annotate(total, grad_of=info_of(end).grad_of, gradient_at=info_of(end).gradient_at)
            annotate(end, grad_of=())
        for one in (end, *behind[::-1], root):
            _erase(one)
        made[before_reduction(node if info_of(node).grad_of else total, whole_sums)] = each
    return made


def _separate(edit: Edit, homes: Mapping[str, int]) -> None:
    """Copy a value that several gradients have in common, of parameters that were added: each sum takes its own.

    Gradients at one stage that are this value, and no sum with others, keep one reduction.
    """
    readers: dict[fx.Node, dict[fx.Node | int, dict[fx.Node, None]]] = {}
    for node in edit.graph.nodes:
        home = homes.get(info_of(node).grad_of[0][0]) if info_of(node).grad_of else None
        if home is not None:
            readers.setdefault(node, {}).setdefault(home, {})
            for reader, value in _shared(node):
                by = reader if reader.target is aten.add.Tensor else home
                readers.setdefault(value, {}).setdefault(by, {})[reader] = None
    for value, of in readers.items():
        for users in of.values() if len(of) > 1 else ():
            if not users:
                continue
            with edit.after(value, replace(info_of(value), grad_of=(), gradient_at=())) as emit:
                own = emit(aten.clone.default, value)
            for user in users:
                user.replace_input_with(value, own)


def _shared(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Of a gradient, the values with other users that are added up to it, each with what reads it."""
    if node.target in (aten.add.Tensor, *_KEPT) or node.target in COLLECTIVES:
        for value in node.all_input_nodes:
            if of_forward(value) or value.op != "call_function":
                continue
            if len(value.users) > 1:
                yield node, value
            else:
                yield from _shared(value)


def _cut_behind(edit: Edit, node: fx.Node) -> fx.Node:
    """Let terms of a sum be cut to what a stage has behind it, not each before: other stages have nothing of theirs."""
    cuts, way = list[fx.Node](), list[fx.Node]()
    for term in _terms(node):
        way.append(term)
        while term.target is aten.clone.default and len(term.users) == 1:
            (term,) = term.all_input_nodes
            way.append(term)
        if term.target is not aten.slice.Tensor or len(term.users) > 1:
            return node
        cuts.append(term)
    if len(cuts) < 2 or len({c.args[1:] for c in cuts}) > 1 or any(not _like(c, cuts[0]) for c in cuts):
        return node
    whole = [c.all_input_nodes[0] for c in cuts]
    if any(not _like(x, whole[0]) for x in whole):
        return node
    info = info_of(node)
    total = _added(edit, whole, 0)
    annotate(total, stage=info.stage)
    cut = _again(edit, cuts[0], total, 0)
    annotate(cut, stage=info.stage, grad_of=info.grad_of, gradient_at=info.gradient_at)
    read_instead(list(node.users), {node: cut})
    annotate(node, grad_of=())
    _erase(node)
    for one in way:  # each behind what reads it
        if not one._erased and not one.users:
            node.graph.erase_node(one)
    return cut


def accumulate_by_stage(program: Program) -> None:
    """Let gradients of a value that several stages use be added up from the last stage to the first, as they come.

    Autograd adds them up in the order of its own, in which one of an earlier stage may be wanted by a later one.

    Args:
        program: whose graph is changed.
    """
    stages, edit = _stages(program), Edit(program.graph, program.mesh.device)
    for node in reversed(list(program.graph.nodes)):
        info = info_of(node)
        if node._erased or node.target is not aten.add.Tensor or of_forward(node) or info.grad_of:
            continue
        terms = list(_terms(node))
        of: dict[int, list[fx.Node]] = {}
        for term in terms:
            of.setdefault(stages.get(term, -1), []).append(term)
        if len(of) == 1 or -1 in of or not _backwards(node, stages) or any(not _like(t, node) for t in terms):
            continue
        later, total = sorted(of, reverse=True), None
        for stage in later:
            total = _added(edit, of[stage] if total is None else [total, *of[stage]], stage)
            stages[total] = stage
        assert total is not None
        annotate(total, source=info.source)
        read_instead(list(node.users), {node: total})
        _erase(node)


def _backwards(node: fx.Node, stages: Mapping[fx.Node, int]) -> bool:
    """Whether a sum adds up what an earlier stage gives at a later one."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return False
    mine = [n for n in node.all_input_nodes if len(n.users) == 1]
    return any(stages[n] < stages[node] for n in node.all_input_nodes) or any(_backwards(n, stages) for n in mine)


def _like(one: fx.Node, other: fx.Node) -> bool:
    a, b = checked_value(one), checked_value(other)
    return a.shape == b.shape and a.dtype == b.dtype


def _erase(node: fx.Node) -> None:
    """Remove a node that nobody uses, and sums that only it used."""
    if not node.users and not node._erased:
        given = node.all_input_nodes
        node.graph.erase_node(node)
        for n in given:
            if n.target is aten.add.Tensor:
                _erase(n)


def _stages(program: Program) -> dict[fx.Node, int]:
    """The stage of each node of the backward that has one: of what no module is said of, the first of its operands."""
    made: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        stage = info_of(node).stage
        known = [made[n] for n in node.all_input_nodes if n in made]
        if node.op == "call_function" and (stage is not None or known):
            made[node] = stage if stage is not None else max(known) if of_forward(node) else min(known)
    return made


def _joined(node: fx.Node, whole_sums: bool) -> tuple[list[fx.Node], fx.Node]:
    """The sum of contributions in front of a gradient, and the casts and sums over ranks right behind it, in order."""
    way, at = list[fx.Node](), node
    while at.op == "call_function" and len(at.all_input_nodes) == 1:
        before = at.all_input_nodes[0]
        if len(before.users) > 1 or not (at.target in _KEPT or (is_sum(at) and not whole_sums)):
            break
        way.append(at)
        at = before
    way.reverse()
    kept = next((i for i, n in enumerate(way) if n.target is not aten._to_copy.default and not is_sum(n)), len(way))
    return way[:kept], at


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """What is added up to a node."""
    is_sum_of_two = node.target is aten.add.Tensor and len(node.args) == 2 and len(node.all_input_nodes) == 2
    if is_sum_of_two and not node.kwargs and not of_forward(node):
        for term in node.all_input_nodes:
            yield from _terms(term) if len(term.users) == 1 else (term,)
    else:
        yield node


def _added(edit: Edit, terms: Sequence[fx.Node], stage: int) -> fx.Node:
    total, *rest = terms
    for term in rest:
        with edit.after(max(total, term), replace(info_of(total).beside(), stage=stage)) as emit:
            total = emit(aten.add.Tensor, total, term)
    return total


def _again(edit: Edit, node: fx.Node, term: fx.Node, stage: int) -> fx.Node:
    """What a node does, done to a term of its input."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: term)
    with edit.after(term, replace(info_of(node), stage=stage, grad_of=(), gradient_at=())) as emit:
        return emit(node.target, *args, **kwargs)


# ---------------------------------------------------------------------------------------------- reductions


@dataclass
class StageSums:
    """What of an update reduces gradients, by the stage whose parameters they are.

    Attributes:
        places: sums of gradients of parameters that lie at a stage: what they are, where the parameter is, and which
            stage adds to them.
        nodes: what reduces them, with the stage that has the parameter.
        ends: of these, what the update reads, with the parameter.
        read: the places that they read.
        unit: by what sums are multiplied first; ``multiplied``: by this node of the update.
    """

    places: dict[fx.Node, tuple[Input, int, int]] = field(default_factory=dict)
    nodes: dict[fx.Node, int] = field(default_factory=dict)
    ends: dict[fx.Node, str] = field(default_factory=dict)
    read: list[fx.Node] = field(default_factory=list)
    unit: float = 1.0
    multiplied: fx.Node | None = None


def divide_after_reduction(
    flush: Program, update: SumsUpdate, stages: Mapping[str, int], adds: Mapping[str, int], unit: float
) -> StageSums:
    """Let an update divide gradients after they were reduced, not before, and say what reduces them.

    Args:
        flush: the update, whose graph is changed; ``update``: what it does with sums.
        stages: of parameters that lie at one.
        adds: of a sum, by its name, the stage that adds to it, where that may be another one than the parameter's.
        unit: by what sums are multiplied where they are reduced in half precision.
    """
    made, graph = StageSums(), flush.graph
    for node, given in zip(flush.placeholders, flush.inputs, strict=True):
        if given.kind == "accumulator" and given.owner in stages:
            home = stages[given.owner]
            made.places[node] = given, home, adds.get(given.name, home)
    memory = {s for n in made.places for s in storages(n)}
    for node in graph.nodes:
        if node.op != "call_function" or info_of(node).role != "backward" or is_mutating(node):
            continue
        homes = [made.nodes[n] if n in made.nodes else made.places[n][1] if n in made.places else None
                 for n in node.all_input_nodes]  # fmt: skip
        if homes and homes[0] is not None and None not in homes:
            made.nodes[node] = homes[0]
    seen = [n for n in (*made.places, *made.nodes) if not memory.isdisjoint(storages(n))]
    # What the update reads as it was added up needs no reduction: copies of it are those that leave the program.
    own = (update.divided, update.emptied)
    kept = {s for n in seen for u in n.users if u not in made.nodes and u not in own for s in storages(n)}
    for node in made.places:
        if not kept.isdisjoint(storages(node)):
            _forget(node, made)
    made.nodes = {n: s for n, s in made.nodes.items() if _sends(n, made.nodes, memory)}
    for node in made.nodes:
        if not memory.isdisjoint(storages(node)):
            continue
        if any(u not in made.nodes for u in node.users):
            made.ends[node] = _owner(node, made)
    end = flush.placeholders[-1]
    for node in made.nodes:
        end.append(node)
        end = node
    made.read = list(dict.fromkeys(n for node in made.nodes for n in node.all_input_nodes if n in made.places))
    _divide(flush, update, made, unit)
    return made


def _forget(node: fx.Node, made: StageSums) -> None:
    for user in node.users:
        if user in made.nodes:
            del made.nodes[user]
            _forget(user, made)


def _sends(node: fx.Node, nodes: Mapping[fx.Node, int], memory: set[int]) -> bool:
    """Whether a node makes something of sums, or what it gives is made to something: other views stay in the update."""
    if memory.isdisjoint(storages(node)):
        return True
    return any(u in nodes and _sends(u, nodes, memory) for u in node.users)


def _owner(node: fx.Node, made: StageSums) -> str:
    while node not in made.places:
        node = node.all_input_nodes[0]
    return made.places[node][0].owner


def bytes_of(made: StageSums, program: Program, homes: Sequence[int]) -> dict[int, int]:
    """Bytes of the sums of each stage, and of what it makes of them, as ranks beside this one have them.

    Args:
        program: the whole step.
        homes: the rank of each stage along the axis of stages.
    """
    axis, found = program.mesh.axis_index(program.stages), dict.fromkeys(range(len(homes)), 0)

    def add(stage: int, spec: Spec | None, node: fx.Node) -> None:
        at, value = list(program.mesh.coordinate(program.rank)), checked_value(node)
        at[axis] = homes[stage]
        shape = value.shape if spec is None else spec.local_shape(tuple(at))
        found[stage] += math.prod(shape) * value.dtype.itemsize

    # A reduced gradient lies as what is updated by it.
    lie = {i.name: i.spec for i in program.inputs if i.kind == "param"}
    lie |= {i.owner: i.spec for i in program.inputs if i.kind == "state" and i.spec is not None and i.spec.ndim}
    for place, (given, _, stage) in made.places.items():
        add(stage, given.spec, place)
    for end, name in made.ends.items():
        add(made.nodes[end], lie[name], end)
    return found


def _divide(flush: Program, update: SumsUpdate, made: StageSums, unit: float) -> None:
    div = update.divided
    if div is None or not made.nodes:
        return
    places: Any = div.args[0]
    total = div.args[1]
    assert isinstance(total, fx.Node)
    kept = [n for n in places if n not in made.read]
    ends = list({storages(n): n for n in reversed(made.ends)}.values())[::-1]
    if not any(torch.float16 in (checked_value(n).dtype, *n.args) for n in made.nodes):
        div.args = ([*kept, *ends], total)
        return
    # Sums of what was multiplied by weights are larger than half precision goes.
    made.unit, edit = unit, Edit(flush.graph, flush.mesh.device)
    with edit.before(next(iter(made.nodes)), UPDATE_WEIGHTS) as emit:
        made.multiplied = emit(aten._foreach_mul_.Scalar, made.read, unit)
    with edit.before(div, UPDATE_WEIGHTS) as emit:
        scaled = emit(aten.mul.Tensor, total, unit)
        if kept:
            emit(aten._foreach_div_.Tensor, kept, total)
    div.args = (ends, scaled)


Taken = tuple[Program, dict[int, Program], list[Message]]


def split_reductions(flush: Program, update: SumsUpdate, made: StageSums, here: Sequence[int]) -> Taken:
    """The update without what reduces gradients, the part ``R`` of the stages that a rank has, and what goes between
    them.

    Args:
        flush: is changed.
        here: the stages of this rank.
    """
    counts: dict[tuple[int, int], int] = {}
    sent: dict[fx.Node, Message] = {}
    for place, (_, home, at) in made.places.items():
        if at != home:
            number = counts[at, home] = counts.get((at, home), -1) + 1
            sent[place] = Message(f"R {at}>{home}.{number}", StagePart.REDUCE_GRAD, at, home, checked_value(place).size)
    parts = {stage: part for stage in here if (part := _part(flush, made, stage, sent)) is not None}
    _ungathered(flush, {place.owner for place, home, _ in made.places.values() if home not in here})
    return _without(flush, update, made, here), parts, list(sent.values())


def _ungathered(flush: Program, others: set[str]) -> None:
    """Of parameters of other stages this rank has no elements, and its group none to gather: what the update left."""
    graph, edit = flush.graph, Edit(flush.graph, flush.mesh.device)
    for node in list(graph.nodes):
        if node.target in COLLECTIVES and info_of(node).gather in others and info_of(node).role == "optimizer":
            with edit.before(node, replace(info_of(node), cause=None, gather="")) as emit:
                made = emit(aten.new_zeros.default, node.args[0], list(checked_value(node).shape))
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _part(flush: Program, made: StageSums, stage: int, sent: Mapping[fx.Node, Message]) -> Program | None:
    """What a stage does with its sums behind its last backward."""
    nodes = [n for n, s in made.nodes.items() if s == stage]
    read = {n for node in nodes for n in node.all_input_nodes}
    graph, inputs, places, own = fx.Graph(), list[Input](), dict[fx.Node, fx.Node](), list[fx.Node]()
    edit = Edit(graph, flush.mesh.device, beside=flush.graph)
    outputs: list[tuple[Output, fx.Node]] = []
    for place, (given, _, at) in made.places.items():
        if place not in read and not (at == stage and place in sent):
            continue
        places[place] = graph.placeholder(place.name)
        annotate(places[place], role="input", value=checked_value(place))
        inputs.append(given if at == stage else replace(given, name=sent[place].name, kind="edge"))
        own += [places[place]] if at == stage else []
    if not places:
        return None
    if own and made.unit != 1:  # all may come from other stages
        edit.emit(UPDATE_WEIGHTS, aten._foreach_mul_.Scalar, own, made.unit)
    for place, message in sent.items():
        if message.src == stage:
            outputs.append((Output(message.name, "edge"), edit.emit(_SUMS, aten.clone.default, places[place])))
    for node in nodes:
        places[node] = graph.node_copy(node, places.__getitem__)
    outputs += [(Output(name, "reduced"), places[n]) for n, name in made.ends.items() if made.nodes[n] == stage]
    if own:
        edit.emit(UPDATE, aten._foreach_zero_.default, own)
    graph.output(tuple(n for _, n in outputs))
    return replace(flush, graph=graph, inputs=tuple(inputs), outputs=tuple(o for o, _ in outputs))


def _without(flush: Program, update: SumsUpdate, made: StageSums, here: Sequence[int]) -> Program:
    """The update, which is given reduced gradients; none of those of other stages has elements."""
    graph = flush.graph
    given = dict(zip(flush.placeholders, flush.inputs, strict=True))
    for end, name in made.ends.items():
        with graph.inserting_after(flush.placeholders[-1]):
            place = graph.placeholder(f"reduced_{name.replace('.', '_')}")
        annotate(place, role="input", value=checked_value(end))
        if len(info_of(end).grad_of) > 1:  # of parameters that are added, say: one reduction serves them
            annotate(place, grad_of=info_of(end).grad_of)
        given[place] = Input(name, "reduced" if made.nodes[end] in here else "accumulator", owner=name)
        end.replace_all_uses_with(place)
    _copied(graph, flush.mesh.device, {n for n, i in given.items() if i.kind == "accumulator"})
    if made.multiplied is not None:
        graph.erase_node(made.multiplied)
    emptied: Any = update.emptied.args[0]
    update.emptied.args = ([n for n in emptied if n not in made.read],)
    for node in reversed(made.nodes):
        graph.erase_node(node)
    for place in made.places:
        if not place.users:
            graph.erase_node(place)
    return replace(flush, inputs=tuple(given[n] for n in flush.placeholders))


def _copied(graph: fx.Graph, device: str, sums: Collection[fx.Node]) -> None:
    """Let copies of sums leave an update that returns them: sums are the next step's, a gradient is the caller's."""
    (output,), made = graph.find_nodes(op="output"), dict[fx.Node, fx.Node]()
    with Edit(graph, device).before(output, _SUMS) as emit:
        for node in [n for n in output.args[0] if n in sums]:
            made[node] = emit(aten.clone.default, node)
    output.args = (tuple(made.get(n, n) for n in output.args[0]),)


__all__ = ["StageSums", "bytes_of", "contributions", "divide_after_reduction", "split_reductions", "stages_of"]
