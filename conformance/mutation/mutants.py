"""Mutants of a module's source, by mutmut's operators."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators


@dataclass(frozen=True, eq=False)
class Mutant:
    """One change of a module.

    Args:
        function: the outermost function that holds it (``"Class.method"``), or ``""``.
        body: whether it lies in the body of that function: not among its defaults.
        lines: the first and the last line of what is changed.
    """

    tree: cst.Module
    old: cst.CSTNode
    new: cst.CSTNode
    function: str
    body: bool
    lines: tuple[int, int]

    @cached_property
    def source(self) -> str:
        """The whole module with the change."""
        made = self.tree.deep_replace(self.old, self.new)
        assert isinstance(made, cst.Module)
        return made.code

    @cached_property
    def change(self) -> tuple[str, str]:
        """The lines that differ: before, and after.  With the function they name the mutant."""
        before, after = self.tree.code.splitlines(), self.source.splitlines()
        old, new = [], []
        for tag, i, j, k, n in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if tag != "equal":
                old += before[i:j]
                new += after[k:n]
        return "\n".join(line.strip() for line in old), "\n".join(line.strip() for line in new)


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module in the order of its text, one of each change."""
    tree = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    found = _Finder()
    tree.visit(found)
    return [Mutant(tree.module, *made) for made in found.made]


def _own(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
    """A condition the other way round, where mutmut has nothing to swap: ``if x`` becomes ``if not x``."""
    if isinstance(node, (cst.If, cst.While, cst.CompIf)) and isinstance(
        node.test, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
    ):
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), node.test), **_spaced(node))


def _spaced(node: cst.CSTNode) -> dict[str, cst.BaseParenthesizableWhitespace]:
    name = "whitespace_before_test" if isinstance(node, (cst.If, cst.CompIf)) else "whitespace_after_while"
    return {name: cst.SimpleWhitespace(" ")}


def _words(node: cst.CSTNode) -> bool:
    """Words for people, and what only type checkers read: what a test should not hang on."""
    if isinstance(node, cst.SimpleString):
        return " " in node.value and "->" not in node.value
    if isinstance(node, cst.Call):  # what mutmut leaves alone too, and what is nothing when it runs
        return isinstance(node.func, cst.Name) and node.func.value in ("len", "isinstance", "cast")
    return False


def _skipped(node: cst.CSTNode, function: str) -> bool:
    """Of what is not even looked into: an error's words, decorators (caches), assertions, aliases of types."""
    if isinstance(node, (cst.Annotation, cst.Decorator, cst.Raise, cst.Assert, cst.FormattedString)):
        return True
    if isinstance(node, (cst.Import, cst.ImportFrom)) or _is_strict(node):
        return True
    if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
        return True
    if isinstance(node, cst.Assign) and not function:
        name = node.targets[0].target
        return isinstance(name, cst.Name) and (name.value == "__all__" or _is_type(name.value.strip("_")))
    return False


def _is_type(name: str) -> bool:
    return name[:1].isupper() and not name.isupper()


def _is_strict(node: cst.CSTNode) -> bool:
    """Of ``zip(..., strict=True)``: an assertion as well."""
    return isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict"


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[cst.CSTNode, cst.CSTNode, str, bool, tuple[int, int]]] = []
        self.scopes: list[cst.ClassDef | cst.FunctionDef] = []
        self.bodies: list[cst.CSTNode] = []
        self.lines = (1, 1)

    def on_visit(self, node: cst.CSTNode) -> bool:
        place = self.get_metadata(PositionProvider, node, None)
        if place is not None:
            self.lines = place.start.line, place.end.line
        function = self._function()
        if _skipped(node, function):
            return False
        if not _words(node):
            lines = self.lines
            self.made += [(node, new, function, bool(self.bodies), lines) for new in _changes(node)]
        if isinstance(node, (cst.ClassDef, cst.FunctionDef)):
            self.scopes.append(node)
        elif function and self.scopes and self.scopes[-1].body is node and isinstance(self.scopes[-1], cst.FunctionDef):
            self.bodies.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self.scopes and self.scopes[-1] is original_node:
            self.scopes.pop()
        elif self.bodies and self.bodies[-1] is original_node:
            self.bodies.pop()

    def _function(self) -> str:
        names = []
        for scope in self.scopes:
            names.append(scope.name.value)
            if isinstance(scope, cst.FunctionDef):
                return ".".join(names)
        return ""


def _changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            made = list(operator(node))
            if isinstance(node, cst.SimpleString):
                made = made[:1]  # marks and cases are one change
            elif isinstance(node, cst.Call) and (strict := [a for a in node.args if _is_strict(a)]):
                made = [new for new in made if isinstance(new, cst.Call) and strict[0] in new.args]
            yield from made
    yield from _own(node)
