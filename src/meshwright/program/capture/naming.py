"""Which nodes of a step by hand are gradients, and over which axes the step sums them."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from ...layout import Layout, Partial, Spec
from ...mesh import Mesh
from ..ir.nodes import LINEAR_VIEWS, ancestors, annotate, info_of, reduces, value_of

aten = torch.ops.aten

_LINEAR = {
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
    while not is_source(at) and (reduces(at) or at.target in _LINEAR):
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


def mark(node: fx.Node, mesh: Mesh) -> None:
    """Say over which axes a gradient is still to be summed, and which nodes do it."""
    grads = info_of(node).grad_of
    axes: dict[str, str] = {}
    stack, seen = list(node.users), set[fx.Node]()
    while stack:
        user = stack.pop()
        if user in seen or info_of(user).role == "forward":
            continue
        seen.add(user)
        if reduces(user):
            axes.update(dict.fromkeys(str(user.args[-2]).split(","), str(user.args[1])))
            annotate(user, sync=info_of(user).sync or grads[0][0])
        if reduces(user) or user.target in _LINEAR:  # one level of sums may follow another
            stack.extend(user.users)
    if axes:
        open_ = Layout(mesh, {a: Partial(op) for a, op in axes.items()})
        annotate(node, grad_of=tuple((n, s.with_(layout=open_)) for n, s in grads))


__all__ = ["join", "mark"]
