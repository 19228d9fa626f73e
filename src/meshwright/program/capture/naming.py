"""Which nodes of a step by hand are gradients, which sum them, and over which axes."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from ...layout import Layout, Partial, Spec
from ...mesh import Mesh
from ..check.flow import entry, owed_of_updates
from ..ir.inplace import storages, written
from ..ir.nodes import LINEAR_VIEWS, ancestors, annotate, info_of, is_sum, reduces, value_of
from ..ir.program import Program

aten = torch.ops.aten

_PASSED = {
    *LINEAR_VIEWS, aten.clone.default, aten.cat.default, aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor,
    aten.mul.Scalar, aten._to_copy.default, operator.getitem,
}  # fmt: skip


def join(name: str, used: fx.Node, asked: set[fx.Node], spec: Spec) -> None:
    """Name the gradient of a parameter that is updated from ``used``: what ``autograd.grad`` gave, alone or added to
    others, with what ``backward`` gave too."""

    def is_source(node: fx.Node) -> bool:
        return node in asked or any(n == name for n, _ in info_of(node).grad_of)

    sources = [n for n in ancestors([used]) if is_source(n)]
    if asked.isdisjoint(sources):
        return
    at, between = used, _between(sources, used)
    while not is_source(at) and (reduces(at) or at.target in _PASSED):
        above = [n for n in at.all_input_nodes if n in between]
        if len(above) != 1:
            break
        (at,) = above  # of a flat buffer of many gradients, the own one
    # Where they are summed over ranks one by one and then added, they stay several.
    value = value_of(at)
    alone = value is not None and value.shape == spec.shape
    made = sources if not alone or any(reduces(n) for n in _between(sources, at)) else [at]
    for node in {*sources, *made}:
        others = tuple(pair for pair in info_of(node).grad_of if pair[0] != name)
        annotate(node, grad_of=(*others, (name, spec)) if node in made else others)


def _between(sources: list[fx.Node], end: fx.Node) -> set[fx.Node]:
    above, found, stack = ancestors([end]), set[fx.Node](), list(sources)
    while stack:
        node = stack.pop()
        if node in above and node not in found:
            found.add(node)
            stack.extend(node.users)
    return found


def settle(program: Program) -> None:
    """Say of the gradients of a step by hand over which axes they are to be summed: as the step does it.

    What a step makes itself (zeros for an unused parameter, say) is the gradient that it updates from.
    """
    _roles(program)
    for name, used, owed in owed_of_updates(program):
        if name not in owed:
            source = _source(used)
            annotate(source, grad_of=(*info_of(source).grad_of, (name, _whole(program, name))))
    for node in program.graph.nodes:
        if info_of(node).grad_of:
            _mark(node, program.mesh)
    _note_sums(program)
    for name, _, owed in owed_of_updates(program):
        if owed.get(name):  # it reaches the update on another way too, on which it is not summed
            _forget(program, name, owed[name])


def _roles(program: Program) -> None:
    """What reads a parameter behind a backward is taken for another forward; what only updates need of it is none."""
    graph = program.graph
    place = {n: i for i, n in enumerate(graph.nodes)}
    first = min((i for n, i in place.items() if info_of(n).role == "backward"), default=len(place))
    differentiated = ancestors(n for n in graph.nodes if info_of(n).transposed)
    for node in ancestors(used for _, used, _ in owed_of_updates(program)) - differentiated:
        if place[node] > first and info_of(node).role == "forward":
            annotate(node, role="backward")


def _whole(program: Program, name: str) -> Spec:
    value = next(value_of(n) for n, i in zip(program.placeholders, program.inputs, strict=True) if i.name == name)
    assert value is not None
    return Spec(value.shape, value.dtype, Layout(program.mesh))


def _source(used: fx.Node) -> fx.Node:
    """Where the gradient that an update reads is first made, of what has its shape."""
    value, at = value_of(used), used
    while True:
        above = [n for n in at.all_input_nodes if _alike(n, value) and n.op == "call_function"]
        above = [n for n in above if info_of(n).role != "forward" and not info_of(n).grad_of]
        if not above:
            return at
        at = above[0]


def _alike(node: fx.Node, value: Any) -> bool:
    own = value_of(node)
    return own is not None and value is not None and own.shape == value.shape


def _mark(node: fx.Node, mesh: Mesh) -> None:
    """Say over which axes a gradient is still to be summed, and which nodes do it."""
    grads = info_of(node).grad_of
    axes: dict[str, str] = {}
    stack, seen = [(node, u) for u in node.users], set[fx.Node]()
    while stack:
        given, user = stack.pop()
        if user in seen or info_of(user).role == "forward":
            continue
        if info_of(user).grad_of:  # another parameter's, which this one is a term of: its sums are its own
            continue
        seen.add(user)
        if is_sum(user):
            axes.update(dict.fromkeys(str(user.args[-2]).split(","), str(user.args[1])))
            annotate(user, sync=info_of(user).sync or grads[0][0])
        if is_sum(user) or _keeps(user, given):  # one level of sums may follow another
            stack.extend((user, u) for u in user.users)
    if axes:
        open_ = Layout(mesh, {a: Partial(op) for a, op in axes.items()})
        annotate(node, grad_of=tuple((n, s.with_(layout=open_)) for n, s in grads))


def _keeps(user: fx.Node, given: fx.Node) -> bool:
    """Whether what a node makes of a gradient is that gradient still, scaled or edited element by element."""
    if user.target is operator.getitem:
        found = entry(user)
        return found is None or any(_alike(n, value_of(given)) for n in found)
    if user.target in _PASSED:
        return True
    if "_foreach_" in str(user.target):
        return True  # what is picked of it says of which entry it is made
    return torch.Tag.pointwise in getattr(user.target, "tags", ()) and _alike(user, value_of(given))


def _note_sums(program: Program) -> None:
    """Say of every sum over ranks behind the forward which parameter's update needs it, whatever it sums."""
    names: dict[fx.Node, str] = {}
    memory: dict[int, str] = {}
    for name, used, _ in owed_of_updates(program):
        names.setdefault(used, name)
    for node in reversed(program.graph.nodes):
        held = storages(node) if node.op == "call_function" else ()
        found = [memory[s] for s in (*written(node), *held) if s in memory]
        name = names.get(node) or next(iter(found), "")
        if not name or info_of(node).role == "forward":
            continue
        if is_sum(node) and not info_of(node).sync:
            annotate(node, sync=name)
        for n in entry(node) or node.all_input_nodes:
            names.setdefault(n, name)
            memory.update((s, memory.get(s, name)) for s in storages(n))


def _forget(program: Program, name: str, axes: frozenset[str]) -> None:
    """Say that the gradient of a parameter is not to be summed over these axes."""
    for node in program.graph.nodes:
        grads = info_of(node).grad_of
        if any(n == name for n, _ in grads):
            annotate(node, grad_of=tuple((n, _without(s, axes) if n == name else s) for n, s in grads))


def _without(spec: Spec, axes: frozenset[str]) -> Spec:
    mesh, placements = spec.mesh, spec.layout.placements
    left = {a: p for a, p in zip(mesh.axes, placements, strict=True) if a not in axes}
    return spec.with_(layout=Layout(mesh, left))


__all__ = ["join", "settle"]
