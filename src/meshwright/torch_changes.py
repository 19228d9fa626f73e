"""What is changed in PyTorch, in one table: where, why, from when on, and when it is undone.

A distributed tensor is a tensor of PyTorch, and some of PyTorch does not ask whose tensor it is given.  There something
of ours takes the place of what PyTorch has.  Each such change is an entry here, made where its code lies.  They are
installed when the first mesh of a process is made: before that there is no distributed tensor, and who only imports
the package has PyTorch as it is.  ``meshwright doctor`` prints the table.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

FIRST_MESH = "the first mesh"
NEVER = "never"
CAPTURE = "a capture"
END_OF_CAPTURE = "at its end"
Make = Callable[[Any, str], Any]  # what takes the place of an original, of which it is told the name


@dataclass(frozen=True)
class TorchChange:
    """Something of PyTorch that is not what it was.

    Attributes:
        targets: dotted names of what is replaced or extended.
        why: what would go wrong without it.
        since: from when on it is there.
        until: when it is undone.
    """

    targets: tuple[str, ...]
    why: str
    since: str = FIRST_MESH
    until: str = NEVER


class StandIn(functools.partial[Any]):
    """A function in the place of one of PyTorch, which tables of PyTorch and of users do not tell from it.

    PyTorch keeps sets and dicts of its functions: the factories that ``torch.device("meta")`` reaches, overridable
    functions, what Dynamo may put into a graph, lowerings, inference rules.  Each is filled at its first use, before or
    after the first mesh.  So the two are equal: a table that has either has both, whenever it was filled.
    A partial, which calls ``run`` from C: hot paths pay for no call of Python more.
    """

    def __new__(cls, original: Any, run: Callable[..., Any]) -> Self:
        made = super().__new__(cls, run)
        functools.update_wrapper(made, original)
        made.__wrapped__ = original
        made._name = getattr(original, "__qualname__", "")
        made._free = isinstance(original, types.BuiltinFunctionType)  # as an attribute of a class it binds no instance
        return made

    __wrapped__: Any
    _name: str
    _free: bool

    def __get__(self, of: Any, kind: Any = None) -> Any:
        return self if of is None or self._free else types.MethodType(self, of)

    def __eq__(self, other: object) -> bool:
        return self is other or self.__wrapped__ == (other.__wrapped__ if isinstance(other, StandIn) else other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __copy__(self) -> StandIn:
        return self

    def __deepcopy__(self, memo: Any) -> StandIn:
        return self

    def __reduce__(self) -> Any:
        return self._name if isinstance(self.__wrapped__, types.FunctionType) else self.__wrapped__.__reduce__()


class SeenByModes(StandIn):
    """A stand-in for what asks function modes in C: they compare what they get with what the name means now."""

    _modes_enabled: Callable[[], bool]  # and not disabled

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._modes_enabled():
            overrides = sys.modules["torch.overrides"]
            return overrides.handle_torch_function(self, (), *args, **kwargs)
        return self.func(*args, **kwargs)


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def _stand_in(original: Any, run: Callable[..., Any]) -> StandIn:
    if not getattr(original, "__qualname__", "").startswith(("_VariableFunctionsClass.", "TensorBase.")):
        return StandIn(original, run)
    made = SeenByModes(original, run)
    made._modes_enabled = importlib.import_module("torch._C")._is_torch_function_mode_enabled
    return made


TABLE: list[TorchChange] = []
_waiting: list[Callable[[], None]] = []
_followers: dict[int, tuple[Any, Any]] = {}  # functions of modules of PyTorch that were replaced, by identity
_LOCK = threading.RLock()  # a change may import a module that has changes of its own
_installed = False  # whether there is a mesh, and all that was waiting for it is in place


def note(*targets: str, why: str, since: str = CAPTURE, until: str = END_OF_CAPTURE) -> None:
    """Enter a change into the table that is made, and undone, by somebody else."""
    TABLE.append(TorchChange(targets, why, since, until))


def install(*targets: str, why: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator for a function that changes ``targets``: called with the first mesh, at once if there is one."""

    def waits(change: Callable[[], None]) -> Callable[[], None]:
        with _LOCK:
            note(*targets, why=why, since=FIRST_MESH, until=NEVER)
            _waiting.append(change)
            if _installed:
                _install_all()
        return change

    return waits


def install_when(since: str, *targets: str, why: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator for a function that changes ``targets`` at a later moment: what is called then, once or again."""

    def later(change: Callable[[], None]) -> Callable[[], None]:
        note(*targets, why=why, since=since, until=NEVER)
        left = [change]

        def now() -> None:
            with _LOCK:
                while left:
                    left[0]()
                    left.clear()

        return now

    return later


def replace(*targets: str, why: str) -> Callable[[Make], Make]:
    """A decorator for a function of an original and its name: what it makes takes the place at each of ``targets``."""

    def made_by(make: Make) -> Make:
        @install(*targets, why=why)
        def change() -> None:
            for target in targets:
                put(target, make)

        return make

    return made_by


def put(target: str, make: Make) -> None:
    """Replace what a dotted name says, now; a name that this PyTorch does not have is passed over."""
    owner, name = find(target)
    original = getattr(owner, name, None)
    if original is None:
        return
    made = make(original, name)
    of_module = isinstance(owner, types.ModuleType) and isinstance(original, _FUNCTIONS)
    in_c = isinstance(original, types.MethodDescriptorType) and original.__objclass__ is not object
    if isinstance(made, types.FunctionType) and (of_module or in_c):
        made = _stand_in(original, made)
    setattr(owner, name, made)
    if of_module:
        _followers[id(original)] = (original, made)
        _know_by_identity(original, made)


def _know_by_identity(original: Any, made: Any) -> None:
    """TorchScript knows functions by identity: it takes ``made`` for what ``original`` is to it."""
    scripted = sys.modules.get("torch.jit._builtins")
    op = None if scripted is None else (scripted._builtin_table or {}).get(id(original))
    if scripted is not None and op is not None:
        scripted._register_builtin(made, op)


def find(target: str) -> tuple[Any, str]:
    """The module or class that a dotted name is in, and its name there."""
    path, _, name = target.rpartition(".")
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
        if not isinstance(found, type):  # a package may have a function of the name of a module
            found = sys.modules.get(".".join(parts[:i]), found)
    return found, name


def on_first_mesh() -> None:
    """There is a mesh: what waits for the first one is installed, before anybody else sees a mesh."""
    global _installed
    if _installed and not _waiting:
        return
    with _LOCK:
        _install_all()
        _installed = True


def _install_all() -> None:
    while _waiting:
        change = _waiting.pop(0)
        try:
            change()
        except BaseException:  # the next mesh is told again what is missing
            _waiting.insert(0, change)
            raise
    if _followers:
        _follow()


def _follow() -> None:
    """Names of modules outside of PyTorch that mean a replaced function (``from torch import tensor``) follow it.

    The function itself is one of C, which would take the part of a rank for the whole.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", __package__) or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            original, made = _followers.get(id(value), (None, None))
            if original is not None and original is value:
                vars(module)[name] = made
    _followers.clear()
