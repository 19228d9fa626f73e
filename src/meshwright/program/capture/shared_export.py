"""One export for all simulated ranks that ask for the same, and for all programs that a plan is compared by.

The exported graph is that of one device, so ranks of one simulation whose models, loss functions and batches are alike
get equal graphs, and exporting is half the cost of building a step.  The first rank exports; another one takes its
graph if everything that the export may read is equal: code, closures, modules, hooks, numbers, and what tensors look
like (values are never read).  Whatever cannot be compared counts as different: then the rank exports for itself, as
real processes always do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn as nn

from ...collective.digest import digests
from ...compat import FakeTensorMode, pytree
from ...dispatch import disabled
from ...errors import PassError
from ...ranks import runtime
from ...tensor import DistTensor
from ..ir.regions import Path

Tensor = torch.Tensor
_T = TypeVar("_T")
_KEPT = 2  # exports of a simulation, for steps that are captured in turn
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
)  # fmt: skip
_CONTAINERS = (list, tuple, deque)
# Their keys are serial numbers of registrations, which differ between models that are alike.
_NUMBERED = "_hooks", "_hooks_with_kwargs", "_hooks_always_called"
_OPAQUE = {*sys.stdlib_module_names, "torch", "meshwright"} - {"__main__"}


class _Same:
    """Equal to another one of the same object only, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Request:
    """All that an export may read, in one order.

    Attributes:
        tokens: equal where two exports would give the same graph.
        tensors: those that were met, whose values the graph does not depend on.
        memory: where each of them is.
    """

    tokens: list[Any]
    tensors: list[Tensor]
    memory: list[Any]


def request_of(*roots: Any) -> Request:
    """Describe objects, and what they lead to, without looking at values of tensors."""
    tokens: list[Any] = [_modes()]
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    memory: dict[Any, int] = {}  # tensors that share memory do so on all ranks
    held: list[Any] = []  # temporary objects stay alive, so that no two have one id
    stack: list[Any] = list(reversed(roots))
    with disabled():
        while stack:
            value = stack.pop()
            if isinstance(value, _ATOMS):
                tokens.append((type(value), value))
            elif id(value) in numbers:
                tokens.append(("again", numbers[id(value)]))
            else:
                numbers[id(value)] = len(numbers)
                held.append(value)
                if isinstance(value, Tensor):
                    tensors.append(value)
                    tokens.append((*_look(value), memory.setdefault(pointer(value), len(memory))))
                else:
                    token, inside = _open(value)
                    tokens += [token, len(inside)]
                    stack += reversed(inside)
        return Request(tokens, tensors, [pointer(t) for t in tensors])


def _modes() -> tuple[Any, ...]:
    """What of the thread an export may read."""
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), casts,
        torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled(), runtime.RT.strategies,
    )  # fmt: skip


def pointer(t: Tensor) -> Any:
    """Where a tensor is; nothing else has it."""
    return (t.data_ptr(), t.shape, t.stride()) if t.numel() and not t.is_meta else id(t)


def _look(t: Tensor) -> tuple[Any, ...]:
    """What an export sees of a tensor."""
    shown = (type(t), t.dtype, t.device.type, t.requires_grad, t.is_leaf, t.layout)
    if isinstance(t, DistTensor):
        return (*shown, t.spec)
    return (*shown, tuple(t.shape), tuple(t.stride()) if t.layout is torch.strided else None)


def _open(value: Any) -> tuple[Any, list[Any]]:
    """What tells an object from others, but for what it leads to, and that."""
    kind = type(value)
    if kind is types.FunctionType:
        cells = [_content(c) for c in value.__closure__ or ()]
        read = [value.__globals__.get(n) for n in value.__code__.co_names]
        token = (
            "function",
            _Same(value.__code__),
            _Same(value.__globals__),
            [x for x in read if isinstance(x, _ATOMS)],
        )
        return token, [*cells, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if kind is types.MethodType:
        return "method", [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return ("partial", kind), [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return ("dict", kind), [x for item in value.items() for x in item]
    if isinstance(value, _CONTAINERS):
        return ("list", kind), list(value)
    if isinstance(value, (set, frozenset)) and all(isinstance(x, (str, int)) for x in value):
        return ("set", kind), sorted(value, key=repr)
    if isinstance(value, nn.Module):
        named = vars(value).items()
        return ("module", kind), [x for k, v in named for x in (k, _without_serials(k, v))]
    if dataclasses.is_dataclass(kind) and kind.__module__.startswith("meshwright"):
        return ("record", kind), [getattr(value, f.name) for f in dataclasses.fields(value)]
    own = kind.__module__.partition(".")[0] not in _OPAQUE and not isinstance(value, type)
    if own and hasattr(value, "__dict__") and not any("__slots__" in vars(k) for k in kind.__mro__):
        return ("object", kind), [vars(value)]
    return _Same(value), []


def _without_serials(name: str, value: Any) -> Any:
    return list(value.values()) if name.endswith(_NUMBERED) and isinstance(value, dict) else value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _Same(cell)


# ---------------------------------------------------------------------------------------------- what ranks share


@dataclass(frozen=True)
class Exported:
    """What an export gave.

    Attributes:
        program: of ``torch.export``.
        regions: its checkpointed calls.
        fakes: name of each parameter and buffer to its stand-in.
        tied: other name of a parameter or buffer to the first one.
        given: stand-ins of the leaves of the batch.
        mode: of the stand-ins.
        ours: where each tensor of the rank that exported is, to the one of this rank in its place.
        answers: what was asked of the graph, and the answers, of all ranks that have this export.
    """

    program: Any
    regions: dict[str, Path]
    fakes: dict[str, Tensor]
    tied: dict[str, str]
    given: list[Tensor]
    mode: FakeTensorMode
    ours: Mapping[Any, Tensor] = dataclasses.field(default_factory=dict)
    answers: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def own(self, constant: Tensor) -> Tensor:
        """This rank's tensor in place of a constant of the graph."""
        return self.ours.get(pointer(constant), constant)


Shelf = deque[tuple[list[Any], list[Any], Exported, set[int]]]
_reused: ContextVar[Shelf | None] = ContextVar("reused exports", default=None)


def find(request: Request) -> Exported | None:
    """The export of another simulated rank that asked for the same; or an earlier one, inside of :func:`reusing`."""
    for tokens, memory, exported, ranks in _shelf():
        if tokens == request.tokens and (_reused.get() is not None or runtime.RT.rank not in ranks):
            ranks.add(runtime.RT.rank)
            return dataclasses.replace(exported, ours=dict(zip(memory, request.tensors, strict=True)))
    return None


def keep(request: Request, exported: Exported) -> None:
    """Let other simulated ranks have an export, if its graph holds no object of the user's."""
    if _is_plain(exported.program.graph_module):  # tensors are left out: they live as long as others say
        _shelf().append((request.tokens, request.memory, exported, {runtime.RT.rank}))


def answered(answers: dict[Any, Any], question: Any, answer: Callable[[], _T]) -> _T:
    """What ``answer`` gives, or a PassError as it raises, asked once of all ranks that have one export.

    Args:
        question: all that the answer depends on besides the graph.
    """
    if question not in answers:
        try:
            answers[question] = answer()
        except PassError as error:  # without its frames, which hold what this rank has
            answers[question] = type(error), error.args
            raise
    known = answers[question]
    if isinstance(known, tuple):
        error_type, args = known
        raise error_type(*args)
    return known


def constants_of(tensors: Iterable[Tensor]) -> tuple[Any, ...] | None:
    """What tells the values of constants from others, on any rank; None where that cannot be told."""
    read = [t for t in tensors if not t.is_meta]
    if any(isinstance(t, DistTensor) or t.layout is not torch.strided for t in read):
        return None
    return tuple((t.dtype, t.shape, n) for t, n in zip(read, digests(read), strict=True))


def _shelf() -> Shelf:
    """Exports, newest last, with the ranks that had them: one that asks again may read what has changed since."""
    reused = _reused.get()
    if reused is not None:
        return reused
    return runtime.RT.sim.shared.setdefault("exports", deque(maxlen=_KEPT))  # type: ignore[union-attr]


def _is_plain(module: torch.fx.GraphModule) -> bool:
    """Whether all that nodes hold besides values are numbers and names: an object could hold tensors of one rank."""
    graphs = [m for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
    return all(
        isinstance(x, (torch.fx.Node, *_ATOMS))
        for m in graphs
        for n in m.graph.nodes
        for x in pytree.tree_leaves((n.args, n.kwargs))
    )


def is_shared() -> bool:
    """Whether this rank is one of a simulation that shares exports, or inside of :func:`reusing`."""
    return _reused.get() is not None or hasattr(runtime.RT.sim, "shared")


@contextlib.contextmanager
def reusing(shelf: Shelf) -> Iterator[None]:
    """Inside, exports that ask for the same as one on the shelf are that one.

    For programs that are compared and never run: what opaque objects of the user's say is not asked again.
    """
    before = _reused.set(shelf)
    try:
        yield
    finally:
        _reused.reset(before)


class _Watched(runtime.Runtime):
    """The state of a rank that notes whether somebody asks which rank it is."""

    @property
    def rank(self) -> int:  # type: ignore[override]
        self.__dict__["asked"] = True
        return self.__dict__["rank"]


@contextlib.contextmanager
def noting_rank() -> Iterator[list[bool]]:
    """Inside, a simulated rank notes whether its code asks which rank it is: then the list gets an element."""
    rt, asked = runtime.RT, list[bool]()
    if not is_shared():
        yield asked
        return
    before = rt.__class__
    rt.__class__ = _Watched
    try:
        yield asked
    finally:
        rt.__class__ = before
        if rt.__dict__.pop("asked", False):
            asked.append(True)
