"""Running a program: Python code made from the graph once, with every call bound beforehand.

The same code runs on real processes and on simulated ranks: collectives are those of ``collective``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ... import collective, compat
from ...collective import COLLECTIVES, STARTS, WAIT_OP, profiler, told
from ...dispatch import autocast
from ...errors import ProgramError
from ...ranks.runtime import PROGRAM
from ..ir.inplace import storages
from ..ir.nodes import checked_value, is_mutating, value_of
from ..ir.program import PASSED, Program
from ..ir.purposes import Purpose
from ..ir.sizes import Size, Variables
from ..ir.strides import LAID, Strides, laid, with_strides

Tensor = torch.Tensor
Runner = Callable[[Sequence[Tensor]], list[Tensor]]
Watch = Callable[[fx.Node], "tuple[Any, ...] | None"]

_PER_LINE = 12


def compile_program(program: Program) -> Runner:
    """A function from the inputs (local tensors, in order) to the outputs, for this rank.

    Parameters, buffers and states are updated in place.  Process groups are made here, so all ranks call it together.
    """
    return Compiled(program).at(())


class Compiled:
    """A program as Python code, which is made once for batches of all sizes.

    Args:
        variables: of how many variables the sizes in it are.
    """

    def __init__(self, program: Program, variables: int = 0) -> None:
        self.program, self.variables = program, variables
        self._bodies: dict[Any, Callable[..., list[Tensor]]] = {}
        self._odd: set[str] = set()  # nodes whose kernel gave other strides than its stand-in said
        self._body(None)

    def at(self, variables: Variables) -> Runner:
        """For one size."""
        odd: frozenset[str] | None = None

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            # Below autograd, but no inference tensors: users may go on computing with what comes out.
            nonlocal odd
            if autocast.active():  # its casts are nodes
                with torch.autocast(self.program.mesh.device, enabled=False):
                    return run(inputs)
            with torch.no_grad(), compat.AutoDispatchBelowAutograd():
                if odd is not None:
                    return self._body(odd)(inputs, *variables)
                # Which kernels do so depends on strides and shapes only: what the first run has seen holds for all.
                self._odd = set()
                made = self._body(None)(inputs, *variables)
                odd = frozenset(self._odd)
                self._body(odd)
            return made

        return run

    def once(self, inputs: Sequence[Tensor], watch: Watch | None = None) -> list[Tensor]:
        """Run it for one size, without making the code that further runs would have.

        Args:
            watch: as of :func:`python_of`.
        """
        if autocast.active():  # its casts are nodes
            with torch.autocast(self.program.mesh.device, enabled=False):
                return self.once(inputs, watch)
        body = self._body(None) if watch is None else _compiled(self.program, watch, 0, False)
        with torch.no_grad(), compat.AutoDispatchBelowAutograd():
            return body(inputs)

    def _body(self, odd: frozenset[str] | None) -> Callable[..., list[Tensor]]:
        """The code; without ``odd`` it finds out.  While somebody profiles, collectives in it say what they are for."""
        key = odd, profiler._is_profiler_enabled
        found = self._bodies.get(key)
        if found is None:
            watch = self._looked_at if odd is None else lambda n: self._strides_call(n) if n.name in odd else None
            found = self._bodies[key] = _compiled(self.program, watch, self.variables, key[1])
        return found

    def _looked_at(self, node: fx.Node) -> tuple[Any, ...] | None:
        value = value_of(node)
        return None if value is None else (self._as_recorded, node.name, value.strides)

    def _strides_call(self, node: fx.Node) -> tuple[Any, ...]:
        return with_strides, checked_value(node).strides

    def _as_recorded(self, t: Tensor, name: str, strides: Strides) -> Tensor:
        made = with_strides(t, strides)
        if made is not t:
            self._odd.add(name)
        return made


def _compiled(program: Program, watch: Watch, variables: int, profiled: bool) -> Callable[..., list[Tensor]]:
    source, names = python_of(program, watch, variables, profiled)
    scope: dict[str, Any] = {}
    exec(compile(source, f"{PROGRAM}{program.rank}>", "exec"), names, scope)
    body: Callable[..., list[Tensor]] = scope["step"]
    return body


def makes(node: fx.Node) -> bool:
    """Whether a node gives one tensor in memory of its own."""
    value = value_of(node)
    if value is None or node.target in STARTS.values() or node.target is WAIT_OP or not node.users:
        return False
    if node.target is operator.getitem:
        return True
    return not is_mutating(node) and all(value.storage not in storages(n) for n in node.all_input_nodes)


def python_of(
    program: Program, watch: Watch = lambda node: None, variables: int = 0, profiled: bool = False
) -> tuple[str, dict[str, Any]]:
    """Source of ``step(inputs)``, or ``step(inputs, u0, u1)``, and the names that it uses.

    All names in it are made here: those of the nodes may come from a file.

    Args:
        watch: of a node that makes memory, a function that its tensor goes through, and further arguments; or None.
        variables: of how many variables the sizes in it are.
        profiled: its collectives say what they are for.
    """
    names: dict[str, Any] = {}
    nodes = {n: f"v{i}" for i, n in enumerate(program.graph.nodes)}
    bound: dict[Any, str] = {}
    last = last_uses(program.graph)
    inputs = {n.name: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    words = {n: Purpose.of(program, n, inputs).words for n in program.collectives()} if profiled else {}
    passed = {n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind in PASSED}
    lines = [f"def step({', '.join(['inputs', *(f'u{i}' for i in range(variables))])}):"]
    given = [nodes[n] for n in program.placeholders]
    lines.append(f"    ({', '.join(given)},) = inputs" if given else "    pass")
    lines += ["    inputs.clear()"] if passed else []  # who calls it keeps nothing of what was passed on
    for node in program.graph.nodes:
        if node.op == "call_function":
            assigned = f"{nodes[node]} = " if node.users else ""
            lines.append(f"    {assigned}{_call(node, nodes, names, bound, words.get(node))}")
            through = watch(node) if makes(node) else None
            if through is not None:
                fn, *rest = [_text(a, nodes, names) for a in through]
                lines.append(f"    {nodes[node]} = {fn}({', '.join((nodes[node], *rest))})")
        elif node.op == "output":
            lines.append(f"    return [{', '.join(_text(a, nodes, names) for a in node.args[0])}]")
        dead = [nodes[n] for n in last.get(node, ()) if n.op != "placeholder" or n in passed]
        for i in range(0, len(dead), _PER_LINE):
            lines.append(f"    del {', '.join(dead[i : i + _PER_LINE])}")
    return "\n".join(lines) + "\n", names


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node to the values that nobody needs after it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found


def _call(
    node: fx.Node, nodes: dict[fx.Node, str], names: dict[str, Any], bound: dict[Any, str], words: str | None
) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], nodes, names)}[{_text(node.args[1], nodes, names)}]"
    if node.target in COLLECTIVES:
        *given, axes, mesh = node.args
        way = _collective(node.target)
        name = _bind((node.target, words), lambda: way if words is None else told(way, words), names, bound)
        group = _bind(("group", axes), lambda: _group(str(axes), str(mesh)), names, bound)
        return f"{name}({', '.join([*(_text(a, nodes, names) for a in given), group])})"
    if node.target is LAID.default:
        names["laid"] = laid
        return f"laid({', '.join(_text(a, nodes, names) for a in node.args)})"
    if node.target is WAIT_OP:
        return f"{_text(node.args[0], nodes, names)}.wait()"
    name = _bind(node.target, lambda: _callable(node.target), names, bound)
    args = [_text(a, nodes, names) for a in node.args]
    strange = [k for k in node.kwargs if not k.isidentifier()]
    if strange:
        raise ProgramError(f"%{node.name} is given an argument of the name {strange[0]!r}")
    args += [f"{k}={_text(v, nodes, names)}" for k, v in node.kwargs.items()]
    return f"{name}({', '.join(args)})"


def _bind(key: Any, make: Callable[[], Any], names: dict[str, Any], bound: dict[Any, str]) -> str:
    found = bound.get(key)
    if found is None:
        found = bound[key] = f"call_{len(bound)}"
        names[found] = make()
    return found


def _callable(target: Any) -> Any:
    # An overload's own call does nothing but pass its arguments on to this.
    return target._op if isinstance(target, compat.OpOverload) else target


def _collective(target: Any) -> Callable[..., Any]:
    """What runs a collective, given its group; one that only starts gives what ``wait`` is called on."""
    kind = COLLECTIVES[target]
    way = kind.start if target in STARTS.values() else kind.run
    assert way is not None
    return way


def _group(axes: str, mesh: str) -> collective.Group:
    return collective.group_of(axes, mesh)


def _text(a: Any, nodes: dict[fx.Node, str], names: dict[str, Any]) -> str:
    """An argument as source."""
    if isinstance(a, fx.Node):
        return nodes[a]
    if isinstance(a, (tuple, list)):
        inner = ", ".join(_text(x, nodes, names) for x in a)
        return f"[{inner}]" if isinstance(a, list) else f"({inner}{',' if len(a) == 1 else ''})"
    if a is None or type(a) in (bool, int, str):
        return repr(a)
    if isinstance(a, Size):
        return a.source()
    if isinstance(a, float) and a == a and abs(a) != float("inf"):
        return repr(a)
    name = f"value_{len(names)}"
    names[name] = a
    return name
