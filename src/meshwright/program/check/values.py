"""What a node is said to give, compared with what its op gives: shape, dtype, strides and whose memory it is."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...errors import ProgramError
from ..ir.derive import DerivedValue, LocalValue, derive, local_values
from ..ir.nodes import Value, checked_value, info_of, target_name, value_of
from ..ir.program import Program
from ..ir.strides import same

Tensor = torch.Tensor
aten = torch.ops.aten


def check_values(program: Program) -> None:
    """Compare what every node is said to give with what its op gives for its arguments.

    Raises:
        ProgramError: the first node that differs, or whose arguments do not fit.
    """
    known: dict[fx.Node, Any] = {}
    device = program.mesh.device
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = checked_value(node)
            known[node] = LocalValue(value.shape, value.strides, value.dtype)
        elif node.op == "call_function":
            known[node] = _checked(node, known, device)


def _checked(node: fx.Node, known: dict[fx.Node, Any], device: str) -> Any:
    target, value = node.target, info_of(node).value
    if target is operator.getitem:
        return _picked(node, known)
    if not isinstance(target, compat.OpOverload):
        return local_values(value)
    if value is None:
        _check_lists(node)
        return None
    try:
        given, tensors = derive(target, node.args, node.kwargs, known, device)
    except Exception as error:
        text = str(error).strip().splitlines() or [repr(error)]
        raise ProgramError(f"{described(node)}: its arguments do not fit: {text[0]}") from error
    if len(given) == 1 and isinstance(value, Value):
        _compare(node, value, given[0], tensors)
        return given[0].local  # type: ignore[union-attr]
    values = value if isinstance(value, tuple) else (value,)
    if len(values) != len(given):
        raise ProgramError(f"{described(node)} gives {len(given)} values, not the {len(values)} that it is said to")
    for said, made in zip(values, given, strict=True):
        _compare(node, said, made, tensors)
    return tuple([None if g is None else g.local for g in given])


def _picked(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    source, i = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(i, int)
    values, said = info_of(source).value, info_of(node).value
    if not isinstance(values, tuple) or not 0 <= i < len(values):
        raise ProgramError(f"{described(node)} picks value {i} of {source.name}, which does not give that many")
    if values[i] != said:
        raise ProgramError(
            f"{described(node)} is said to be {_text(said)}, but value {i} of {source.name} is {_text(values[i])}"
        )
    return known[source][i]


def _compare(node: fx.Node, said: Any, made: DerivedValue | None, tensors: list[fx.Node]) -> None:
    if made is None or said is None:
        if made is not None or said is not None:
            raise ProgramError(f"{described(node)} is said to give {_text(said)}, and gives {_text(made)}")
        return
    if said.shape != made.local.shape or said.dtype is not made.local.dtype:
        raise ProgramError(
            f"{described(node)} is said to give {_text(said)}, but with these arguments it gives {_text(made)}"
        )
    if not same(said.shape, said.strides, made.local.stride):
        raise ProgramError(
            f"{described(node)} is said to lie in memory with strides {list(said.strides)}, but with these arguments "
            f"it lies with {list(made.local.stride)}"
        )
    if made.alias is not None:
        source = tensors[made.alias]
        held = value_of(source)
        if held is not None and held.storage != said.storage:
            raise ProgramError(f"{described(node)} is a view of {source.name}, but is said to have memory of its own")


def _check_lists(node: fx.Node) -> None:
    """Ops on lists that write: entries that belong together have one shape."""
    lists: list[tuple[str, Any]] = []
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(given, (list, tuple)) and given and all(isinstance(g, fx.Node) for g in given):
            lists.append((argument.name, given))
    if not lists:
        return
    first, wanted = lists[0]
    for name, listed in lists[1:]:
        if len(listed) != len(wanted):
            raise ProgramError(f"{described(node)}: {len(listed)} tensors in {name} for {len(wanted)} in {first}")
        for a, b in zip(wanted, listed, strict=True):
            x, y = value_of(a), value_of(b)
            if x is not None and y is not None and y.shape and x.shape != y.shape:
                raise ProgramError(
                    f"{described(node)}: {b.name} in {name} has shape {list(y.shape)}, {a.name} in {first} "
                    f"{list(x.shape)}: they belong together"
                )


# ---------------------------------------------------------------------------------------------- parts


def described(node: fx.Node) -> str:
    """A node in words: its name, what it calls and the user's line."""
    line = info_of(node).line
    return f"%{node.name} ({target_name(node.target)}{f', {line}' if line else ''})"


def _text(value: Any) -> str:
    if isinstance(value, DerivedValue):
        value = value.local
    if isinstance(value, (Value, LocalValue)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else f"{len(tuple(_each(value)))} values"


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, tuple) else (value,)


__all__ = ["check_values", "described"]
