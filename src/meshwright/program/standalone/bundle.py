"""Sources of functions of this package, with all that they call, for a file that cannot import it."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from ...errors import ProgramError

PACKAGE = __name__.partition(".")[0]
_SKIPPED = {"operator", "LIBRARY"}  # registrations of operators


@dataclass(frozen=True)
class _Module:
    """What a module defines at its top level, and where its imported names come from."""

    lines: list[str]
    nodes: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str]]  # name to (module, name there); a module itself has no name there


@lru_cache
def _read(name: str) -> _Module:
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    made = _Module(source.splitlines(), {}, {})
    package = name if hasattr(module, "__path__") else name.rpartition(".")[0]
    for stmt in ast.parse(source).body:
        if isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
            made.nodes[stmt.name] = stmt
        elif isinstance(stmt, ast.Assign):
            names = [n for t in stmt.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            made.nodes.update({n.id: stmt for n in names if isinstance(n.ctx, ast.Store)})
        elif isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
            made.nodes[stmt.target.id] = stmt
        elif isinstance(stmt, ast.Import):
            for alias in stmt.names:
                bound = alias.asname or alias.name.partition(".")[0]
                made.imports[bound] = (alias.name if alias.asname else bound, "")
        elif isinstance(stmt, ast.ImportFrom):
            base = importlib.util.resolve_name("." * stmt.level + (stmt.module or ""), package)
            made.imports.update({a.asname or a.name: (base, a.name) for a in stmt.names})
    return made


@dataclass
class Bundle:
    """Collects sources, in an order in which they can run.

    Attributes:
        imports: Lines of imports of other packages.
        sources: Definitions, in order.
    """

    imports: set[str] = field(default_factory=set)
    sources: list[str] = field(default_factory=list)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _bare: set[tuple[str, str]] = field(default_factory=set)  # functions without their decorators

    def without(self, module: str, name: str) -> None:
        """Leave out a definition that the file has in another form."""
        self._names[module, name] = name

    def add(self, fn: Callable[..., Any]) -> str:
        """Add a function at the top level of a module, and what it needs; its name in the file.

        Raises:
            ProgramError: If it needs more of this package than functions and constants.
        """
        return self._name(fn.__module__, fn.__name__, fn.__name__)

    def add_bare(self, fn: Callable[..., Any]) -> str:
        """Add a function of any package without its decorators, which register it; its name in the file.

        Raises:
            ProgramError: If it stands inside of another function, or needs more than torch.
        """
        if fn.__qualname__ != fn.__name__ or fn.__module__ == "__main__":
            raise ProgramError(f"step.to_python: {fn.__qualname__} does not stand at the top of a module")
        read = _read(fn.__module__)
        for name, value in inspect.getclosurevars(fn).globals.items():
            if name not in read.nodes and name not in read.imports and value is not torch:
                raise ProgramError(f"step.to_python: {fn.__name__} needs {name} of {fn.__module__}")
        self._bare.add((fn.__module__, fn.__name__))
        return self._name(fn.__module__, fn.__name__, fn.__name__)

    def _name(self, module: str, name: str, wanted_by: str) -> str:
        found = self._names.get((module, name))
        if found is not None:
            return found
        read = _read(module)
        if name in read.imports and name not in read.nodes:
            return self._imported(module, *read.imports[name], name, wanted_by)
        node = read.nodes.get(name)
        if node is None:
            raise ProgramError(f"step.to_python: {wanted_by} needs {name} of {module}, which no file can have")
        taken = set(self._names.values())
        together = [n for n, other in read.nodes.items() if other is node]  # ``A, B = 1, 2``
        for one in together:
            chosen = one if one not in taken else f"{module.rpartition('.')[2]}_{one.strip('_')}"
            self._names[module, one] = chosen
        if (module, name) in self._bare:
            node = copy.copy(node)
            node.decorator_list = []  # type: ignore[attr-defined]
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        text = textwrap.dedent("\n".join(read.lines[start - 1 : node.end_lineno]))
        for used in _annotated(node):  # which nobody evaluates
            if used in read.imports and _comes_with_torch(read.imports[used][0]):
                self._imported(module, *read.imports[used], used, wanted_by)
        renamed = {one: self._names[module, one] for one in together}
        for used in dict.fromkeys(_free_names(node)):
            if used in read.nodes or used in read.imports:
                renamed[used] = self._name(module, used, wanted_by)
        for before, after in renamed.items():
            if before != after:
                text = re.sub(rf"(?<![\w.\"']){re.escape(before)}(?![\w\"'])", after, text)
        self.sources.append(text)
        return self._names[module, name]

    def _imported(self, asker: str, module: str, name: str, bound: str, wanted_by: str) -> str:
        """A name that a module imports."""
        if _comes_with_torch(module):
            if name:
                self.imports.add(f"from {module} import {name}" + (f" as {bound}" if bound != name else ""))
            else:
                self.imports.add(f"import {module}" + (f" as {bound}" if bound != module else ""))
            return bound
        package = asker.partition(".")[0]
        other = module.partition(".")[0] != package
        if other or not name or isinstance(getattr(importlib.import_module(module), name, None), ModuleType):
            raise ProgramError(
                f"step.to_python: {wanted_by} calls {bound} of {module if other else package}, which a file that needs "
                "only torch cannot"
            )
        return self._name(module, name, wanted_by)


def _comes_with_torch(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names


def _annotated(node: ast.stmt) -> set[str]:
    """Names in annotations."""
    roots = [
        getattr(n, k) for n in ast.walk(node) for k in ("annotation", "returns") if getattr(n, k, None) is not None
    ]
    return {n.id for root in roots for n in ast.walk(root) if isinstance(n, ast.Name)}


def _free_names(node: ast.stmt) -> Iterator[str]:
    """Names that a definition reads, those of annotations excepted."""
    stack: list[Any] = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and not hasattr(builtins, one.id):
            yield one.id
        for key, value in ast.iter_fields(one):
            if key in ("annotation", "returns"):
                continue
            stack += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]


__all__ = ["Bundle"]
