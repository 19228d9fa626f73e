"""Which nodes are linear, and in which of their inputs: as the rules of their ops say, which know of numbers.

A factor on all inputs of a group may as well be one on what the node gives.  ``g + 0.01``, ``where(c, g, 0.5)`` and a
cast to integers have no such group.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ... import compat
from ...errors import RuleError
from ...rules import RULES, Arg, Rule
from ...rules.pointwise import is_pointwise, pointwise_rule
from .nodes import LINEAR_VIEWS, draws, is_mutating, reduces, value_of

aten = torch.ops.aten

SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
# Of what they are given they take the shape and dtype.
_LENT = {f"{n}_like" for n in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")} | {
    f"new_{n}" for n in ("zeros", "ones", "full", "empty", "empty_strided")
} | {"zero", "fill"}  # fmt: skip
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default}
# The place of the number among the arguments.
_FULL = {aten.full.default: 1, aten.full_like.default: 1, aten.fill.Scalar: 1, aten.scalar_tensor.default: 0}

Groups = tuple[frozenset[fx.Node], ...]


def linear_in(node: fx.Node) -> Groups:
    """The groups of inputs in which a node is jointly linear."""
    if node.target in LINEAR_VIEWS:
        return (frozenset(node.all_input_nodes),)
    if not isinstance(node.target, compat.OpOverload) or is_mutating(node) or reduces(node):
        return ()
    name = node.target._schema.name.removeprefix("aten::")
    rule, tensors = rule_of(node, None if name in _LENT else name)
    found = []
    for group in rule.linear if rule is not None else ():
        nodes = frozenset(tensors[i] for i in group)
        if all(i in group for i, n in enumerate(tensors) if n in nodes):  # ``g * g`` is linear in neither
            found.append(nodes)
    return tuple(found)


def rule_of(node: fx.Node, name: str | None) -> tuple[Rule | None, list[fx.Node]]:
    """The rule that a call has under a name, at its local shapes, and the tensors that it numbers; None: no rule tells.

    Args:
        name: of the op, as rules are listed by.
    """
    tensors: list[fx.Node] = []
    if name is None or is_mutating(node) or any(value_of(n) is None for n in node.all_input_nodes):
        return None, tensors
    rule = RULES.get(name) or (pointwise_rule if is_pointwise(name) else None)
    if rule is None:
        return None, tensors

    def stand_in(n: fx.Node) -> Arg:
        value = value_of(n)
        assert value is not None
        tensors.append(n)
        return Arg(len(tensors) - 1, value.shape, value.dtype)

    args, kwargs = fx.map_arg((node.args, node.kwargs), stand_in)  # type: ignore[arg-type]
    try:
        return rule(*args, **kwargs), tensors
    except (RuleError, TypeError):  # asked as nobody calls the op
        return None, tensors


def is_linear(node: fx.Node) -> bool:
    """Whether a node has one input, is linear in it and may run anywhere between that and its users."""
    given = node.all_input_nodes
    return len(given) == 1 and not draws(node) and (scale_of(node) is not None or frozenset(given) in linear_in(node))


def scale_of(node: fx.Node) -> float | None:
    """The number that a node multiplies its first input with; None for any other node."""
    if node.target not in SCALES or len(node.args) != 2 or node.kwargs:
        return None
    x, by = node.args
    given = value_of(x) if isinstance(x, fx.Node) else None
    made = value_of(node)
    if isinstance(by, bool) or not isinstance(by, (int, float)) or not by or given is None or made is None:
        return None
    if given.dtype is not made.dtype:
        return None
    return float(by) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / float(by)


def lends_shape(node: fx.Node) -> bool:
    """Whether no value of what a node is given is in what it gives."""
    if not isinstance(node.target, compat.OpOverload):
        return False
    name = node.target._schema.name.removeprefix("aten::")
    return name in _LENT and not (name == "fill" and len(node.all_input_nodes) > 1)


def is_zero(node: fx.Node) -> bool:
    """Whether a node gives zeros, whatever it is given: any factor times them is they."""
    while node.target in LINEAR_VIEWS and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.target in _ZEROS or (node.target in _FULL and bool(node.args[_FULL[node.target]] == 0))


__all__ = ["is_linear", "is_zero", "lends_shape", "linear_in", "rule_of", "scale_of"]
