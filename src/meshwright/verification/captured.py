"""Captured steps: the graph of one device run as it is, and the programs of ranks with every value looked at."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ..compat import OpOverload, pytree
from ..dispatch import function_named
from ..generator.dropout import KERNELS
from ..layout import Spec
from ..passes import Pass, PassManager
from ..program import Program
from ..program.capture.export import Captured
from ..program.capture.source_lines import line_of
from ..program.ir.nodes import ancestors, draws, info_of, is_mutating, value_of
from ..program.ir.subgraphs import copied
from ..tensor.graph_marks import GRAD
from .steps import Calls, Training
from .watch import Key, Observed, Tell, held, watch_gradient

Tensor = torch.Tensor


@dataclass
class CapturedTraining(Training):
    """Training on one device by the graph that was captured of the step, in place of the user's code."""

    captured: Captured | None = None

    def forward(self, tell: Tell) -> tuple[Any, Calls]:
        assert self.captured is not None
        named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        leaves = pytree.tree_leaves(self.batch)
        given = [
            s.value if s.value is not None else leaves[s.leaf] if s.kind == "batch" else named[s.name]
            for s in self.captured.sources
        ]
        for source, t in zip(self.captured.sources, given, strict=True):
            if isinstance(t, Tensor) and t.requires_grad:
                watch_gradient(t, Observed(("forward", "leaf", source.name), "", "", None, name=source.name), tell)
        made = _OneDevice(self.captured, tell).run(*given)
        return made, _calls(self.captured)


class _OneDevice(fx.Interpreter):
    """Runs a captured graph on values, and tells each."""

    def __init__(self, captured: Captured, tell: Tell) -> None:
        super().__init__(captured.module)
        self.captured, self.tell = captured, tell
        self.live = _live(captured)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is GRAD.default:
            outputs, inputs, cotangents, create, _ = args  # dtypes are those of the inputs on one device
            made = torch.autograd.grad(
                outputs, inputs, cotangents or None, retain_graph=True, create_graph=create, allow_unused=True
            )
            return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, made, strict=True)]
        if isinstance(target, OpOverload):
            name = op_of(target)
            if name.removesuffix("_") in KERNELS or name == "scaled_dot_product_attention":
                return function_named(name)(*args, **kwargs)  # with the masks that ranks get
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op == "call_function" and isinstance(made, Tensor):
            seen = replace(_seen(n), folded=n not in self.live or self._passes_through(n, made))
            self.tell(held(made, seen))
            if made.requires_grad:
                watch_gradient(made, seen, self.tell)
        return made

    def _passes_through(self, node: fx.Node, made: Tensor) -> bool:
        """Whether an op gave what it was given, as ``to`` and ``detach`` do, or is one of several that another gave."""
        if node.target is operator.getitem:
            return True
        given = (self.env[n] for n in node.all_input_nodes if n in self.env)
        return not is_mutating(node) and any(isinstance(t, Tensor) and made.is_set_to(t) for t in given)


def _live(captured: Captured) -> set[fx.Node]:
    """Nodes that depend on parameters, buffers, the batch or random numbers, and that what the step does depends on."""
    sources = {s.node for s in captured.sources if s.kind != "constant"}
    live: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.name in sources or draws(node) or not live.isdisjoint(node.all_input_nodes):
            live.add(node)
    return live & ancestors(n for n in captured.graph.nodes if n.op == "output" or is_mutating(n) or draws(n))


def op_of(target: Any) -> str:
    """The name of an op as its rule has it."""
    if isinstance(target, OpOverload):
        return str(target._schema.name.rpartition("::")[2])
    return str(getattr(target, "__name__", target))


def _seen(node: fx.Node) -> Observed:
    return Observed(("forward", node.name, "out", 0), op_of(node.target), line_of(node), None)


def _calls(captured: Captured) -> Calls:
    names = {s.node: ("forward", "leaf", s.name) for s in captured.sources}
    made = []
    for node in captured.graph.nodes:
        if node.op == "call_function":
            given: tuple[Key, ...] = tuple(
                names.get(n.name, ("forward", n.name, "out", 0)) for n in node.all_input_nodes
            )
            made.append((op_of(node.target), line_of(node), given))
    return made


# ---------------------------------------------------------------------------------------------- ranks


class WatchedPasses(PassManager):
    """Passes, and after them ``tell`` at each value of the user's program."""

    def __init__(self, passes: PassManager | Sequence[Pass | str], tell: Tell) -> None:
        listed = passes.passes if isinstance(passes, PassManager) else passes
        super().__init__(listed, keep_order=isinstance(passes, PassManager))
        self.tell = tell

    def __call__(self, program: Program) -> Program:
        made = super().__call__(program)
        sums = bool(made.parts)
        parts = {name: watched(part, self.tell, sums) for name, part in made.parts.items()}
        return replace(watched(made, self.tell, sums), parts=parts)


def watched(program: Program, tell: Tell, sums: bool) -> Program:
    """The program with calls of ``tell`` behind each value of the user's program, and each of its gradients.

    Of gradients the first node of a name is told of: passes name what they add a gradient up in after it, too.  Where
    several calls make an update, sums of gradients of parameters are called so before anything is added to them.
    """
    made, known = copied(program), set[Key]()
    for node in list(made.graph.nodes):
        for key, spec in _keys(node):
            if key[0] == "backward" and (key in known or (sums and key[1] == "leaf")):
                continue
            known.add(key)
            name = key[2] if key[1] == "leaf" else ""
            seen = Observed(key, "", info_of(node).line, None, spec, name)
            with made.graph.inserting_after(node):
                made.graph.call_function(_teller(tell, seen), (node,))
    return made


def _keys(node: fx.Node) -> Iterator[tuple[Key, Spec]]:
    """What a node is called in the journal of one device, and how it lies."""
    info = info_of(node)
    if node.op != "call_function" or value_of(node) is None:
        return
    if info.spec is not None and info.role == "forward" and info.source:
        yield ("forward", info.source, "out", 0), info.spec
    for name, spec in info.gradient_at:
        yield ("backward", name, "out", 0), spec
    for name, spec in info.grad_of:
        yield ("backward", "leaf", name), spec


def _teller(tell: Tell, seen: Observed) -> Any:
    def observe(t: Tensor) -> None:
        tell(replace(seen, value=t.clone()))

    return observe
