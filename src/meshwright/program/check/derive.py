"""What a node gives, derived again: shape, dtype, strides and whose memory it is, without data.

Repeated layers ask once: the answer depends on the op, what its tensors look like and its other arguments only.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ... import compat
from ...compat import FakeTensorMode
from ...errors import ProgramError
from ...local_tensor import storage_of
from ..ir.nodes import Value, checked_value, info_of, target_name, value_of
from ..ir.program import Program
from ..ir.strides import same

Tensor = torch.Tensor
aten = torch.ops.aten


class LocalValue(NamedTuple):
    """What a local tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class DerivedValue(NamedTuple):
    """What an op gives: a local tensor, and the number of the tensor among its arguments whose memory it is."""

    local: LocalValue
    alias: int | None


_MOST_PARTS = 1 << 20


class _Typed(NamedTuple):
    """A number that equals one of another type."""

    kind: type
    value: Any


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
        return _declared_values(value)
    if value is None:
        _check_lists(node)
        return None
    tensors: list[fx.Node] = []
    args = _frozen(node.args, known, tensors)
    kwargs = tuple([(k, _frozen(v, known, tensors)) for k, v in node.kwargs.items()]) if node.kwargs else ()
    try:
        given = _derived(target, args, kwargs, device, torch.get_default_dtype())
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


# ---------------------------------------------------------------------------------------------- running an op


class _OfThread(threading.local):
    """The mode of stand-ins: one each costs more than most ops do, as PyTorch notes the stack at which it was made."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()


_of_thread = _OfThread()


@lru_cache(maxsize=16384)
def _derived(
    target: Any, args: Any, kwargs: Any, device: str, default_dtype: torch.dtype
) -> tuple[DerivedValue | None, ...]:
    """What an op gives for tensors that look like these, with this default dtype (which a new tensor may have)."""
    if target is aten.as_strided.default:  # may reach beyond the part of memory that a stand-in has
        first = args[0]
        return (DerivedValue(LocalValue(tuple(args[1]), tuple(args[2]), first.dtype), 0),)
    _refuse_many(target, args)
    stand_ins: list[Tensor] = []
    with _of_thread.mode, torch.no_grad(), compat.AutoDispatchBelowAutograd():
        made = target(*_thawed(args, stand_ins, device), **{k: _thawed(v, stand_ins, device) for k, v in kwargs})
    memory = {storage_of(t): i for i, t in reversed(list(enumerate(stand_ins)))}
    listed = made if isinstance(made, (tuple, list)) else (made,)
    return tuple([_derived_value(t, memory) if isinstance(t, Tensor) else None for t in listed])


def _refuse_many(target: Any, args: Any) -> None:
    """A program from a file must not have verification make tensors without end."""
    returns = target._schema.returns
    if not returns or str(returns[0].type) != "List[Tensor]" or not args or not isinstance(args[0], LocalValue):
        return
    longest, numbers = max((1, *args[0].shape)), [a for a in args[1:] if type(a) is int]
    parts = max(longest, *numbers, 1)
    if "split.Tensor" in str(target) and numbers:
        parts = -(-longest // max(numbers[0], 1))
    elif any(isinstance(a, tuple) for a in args):  # as many as are listed
        parts = 1
    if parts > _MOST_PARTS:
        raise ValueError(f"it would give {parts} tensors")


def _derived_value(t: Tensor, memory: dict[int, int]) -> DerivedValue:
    return DerivedValue(LocalValue(tuple(t.shape), tuple(t.stride()), t.dtype), memory.get(storage_of(t)))


def _frozen(a: Any, known: dict[fx.Node, Any], tensors: list[fx.Node]) -> Any:
    """An argument as a value that can be looked up; its tensors are appended."""
    kind = type(a)
    if kind is fx.Node:
        tensors.append(a)
        return known[a]
    if kind is int or kind is str or a is None:
        return a
    if isinstance(a, (list, tuple)):
        return tuple([_frozen(x, known, tensors) for x in a])
    return _Typed(kind, a)


def _thawed(a: Any, stand_ins: list[Tensor], device: str) -> Any:
    if isinstance(a, LocalValue):
        stand_ins.append(torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device))
        return stand_ins[-1]
    if isinstance(a, _Typed):
        return a.value
    if isinstance(a, tuple):
        return [_thawed(x, stand_ins, device) for x in a]
    return a


# ---------------------------------------------------------------------------------------------- parts


def _declared_values(value: Any) -> Any:
    """What a node is said to give, for what is not an op."""
    if isinstance(value, tuple):
        return tuple(_declared_values(v) for v in value)
    return LocalValue(value.shape, value.strides, value.dtype) if isinstance(value, Value) else None


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
