"""Writes a captured step as a Python file that needs only torch, and this rank's tensors beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from ... import collective
from ...collective import together
from ...compat import pytree
from ...errors import ProgramError
from ...layout import Layout, Spec
from ...mesh import Mesh
from ...resharding.copies import TO_DEVICE, TO_HOST
from ...resharding.executor import apply
from ...resharding.planner import plan as plan_conversion
from ..ir.nodes import checked_value, value_of
from ..ir.program import PASSED, STEP, Program
from ..ir.sizes import Size
from ..run.bind import BoundProgram, CompiledVariant, zeros
from ..run.runner import makes
from . import helpers
from .bundle import Bundle
from .functions import Function, ValueNames, wrapped
from .stages import StageActions
from .statements import Writer, few_in_order

Tensor = torch.Tensor
_RESERVED = {"w", "i", "batch", "step", "load", "start", "main", "torch", "aten", "dist", "math", "os", "sys", "MESH"}
_NOT_TRIED = {*collective.COLLECTIVES, TO_DEVICE, TO_HOST}
_LITERAL = re.compile(r"(?<![\w.])(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False)(?![\w.])")


def to_python(
    ready: CompiledVariant, path: str | PathLike[str], sections: Mapping[str, str], example: Any, done: int = 0
) -> Path:  # fmt: skip
    """Write the programs of a step. All ranks call it together; the first writes the file, each its tensors.

    Args:
        ready: The programs, bound to their tensors.
        path: The file.
        sections: Source of a node to the path and class of its module.
        example: A batch, for its structure.
        done: Micro-steps since the last update.

    Raises:
        ProgramError: If the step needs something that torch alone does not have; the same on all ranks.
    """
    path, program = Path(path), ready.program
    with together(program.mesh, "step.to_python"):
        written = _File(ready, sections, example, done)
    group = collective.group(program.mesh)
    for groups in collective.all_gather_object(written.groups, group, "step.to_python"):
        written.groups = {**written.groups, **groups}
    lines = list(written.lines(path))
    texts = collective.all_gather_object(lines, group, "step.to_python")
    merged = _merged(texts, program.mesh)
    own = path.with_suffix(f".rank{program.rank}.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(written.tensors(), own)
    if merged is not None:
        if group.index == 0:
            path.write_text("\n".join(merged) + "\n")
    else:
        path.with_suffix(f".rank{program.rank}.py").write_text("\n".join(lines) + "\n")
        if group.index == 0:
            path.write_text(_OF_RANKS)
    collective.barrier(group)
    return path


_OF_RANKS = '''"""A step whose ranks do different work: a file for each of them lies beside this one."""

import importlib.util
import os
import sys
from pathlib import Path

_path = Path(__file__).with_suffix(f".rank{os.environ['RANK']}.py")
_spec = importlib.util.spec_from_file_location("step_of_rank", _path)
_module = importlib.util.module_from_spec(_spec)
sys.modules["step_of_rank"] = _module  # which dataclasses look up
_spec.loader.exec_module(_module)
load, step, main = _module.load, _module.step, _module.main

if __name__ == "__main__":
    main()
'''


class _File:
    """The file of one rank.

    Raises:
        ProgramError: As of :func:`to_python`.
    """

    def __init__(self, ready: CompiledVariant, sections: Mapping[str, str], example: Any, done: int) -> None:
        self.ready, self.mesh, self.done = ready, ready.program.mesh, done
        self._check(ready)
        self.bundle = Bundle()
        self.bundle.without(helpers.__name__, "MESH")
        self.how = ready.program.pipeline
        names = list(ready.parts) if self.how else []
        self.parts = {id(ready.parts[name]): ready.parts[name] for name in names}
        self.names = {id(ready.parts[name]): f"part_{name}" for name in names}
        if self.how is None:
            self.parts = {id(bound): bound for bound in ready.schedules[STEP]}
            several = len(self.parts) > 1
            self.names = {key: f"step_{i}" if several else "step" for i, key in enumerate(self.parts)}
        self.groups: dict[str, str] = {}
        self.lists: dict[tuple[str, ...], str] = {}
        self.paths = [_accessor(keys) for keys, _ in pytree.tree_flatten_with_path(example)[0]]
        self.functions: list[tuple[BoundProgram, Function, list[str]]] = []
        prepared = []
        for bound in self.parts.values():
            odd = _odd(bound.program)
            writer = Writer(bound.program, sections, self.bundle, odd, self._keys(bound), self.groups, self.lists)
            calls = [n for n in bound.program.graph.nodes if n.op == "call_function"]
            prepared.append((bound, [writer.statement(n) for n in calls]))
        for bound, _ in prepared:
            self._batch_code(bound)  # which needs helpers, whose names are taken
        reserved = _RESERVED | set(self.bundle._names.values()) | set(self.groups.values())
        for bound, statements in prepared:
            values = ValueNames(set(reserved))
            batch = self._batch(bound, values)
            made = Function(statements, self._keys(bound), bound.program.results, values)
            reserved |= {block.name for block in made.blocks}
            self.functions.append((bound, made, batch))
        self.bodies = [
            (b, list(f.definitions()), c, list(f.body()), list(self._returned(b, f))) for b, f, c in self.functions
        ]
        self._share()
        self.stages: list[str] = []
        if self.how is not None:
            functions = {name: self.names[id(part)] for name, part in ready.parts.items()}
            stages = StageActions(self.how, ready.parts, functions, self.bundle, self.mesh, ready.program.rank)
            self.stages = list(stages.lines())
        for helper in (helpers.mesh_group, helpers.by_rank, helpers.along):
            self.bundle.add(helper)

    def _share(self) -> None:
        """Leave out functions that an earlier part has with the same lines, and call those."""
        known: dict[str, str] = {}
        for at, (bound, definitions, cuts, body, returned) in enumerate(self.bodies):
            kept = []
            for name, lines in definitions:
                text = "\n".join(lines).replace(f"def {name}(", "def (")
                if known.setdefault(text, name) == name:
                    kept.append((name, lines))
                body = [re.sub(rf"\b{name}\(", f"{known[text]}(", line) for line in body]
            self.bodies[at] = (bound, kept, cuts, body, returned)

    @staticmethod
    def _check(ready: CompiledVariant) -> None:
        program = ready.program
        why = ""
        if program.pipeline is not None and program.pipeline.draws:
            why = "its pipeline stages draw random numbers. Use dropout 0, or no pipeline pass"
        elif program.pipeline is not None and program.mesh.device != "cpu":
            why = "its pipeline stages send on a GPU. Capture it on a CPU mesh, or without the pipeline pass"
        elif ready.carrier.optimizer is not None and not ready.carrier.updates:
            name = type(ready.carrier.optimizer).__name__
            why = f"{name} runs after the program. Use SGD, Adam or AdamW without hooks, or optimizer=None"
        elif tuple(program.mesh.ranks) != tuple(range(program.mesh.size)):
            why = f"{program.mesh!r} has its ranks in another order. Use a mesh with ranks 0 to {program.mesh.size - 1}"
        elif ready.carrier.backend is not None:
            why = "its local ops are compiled. Capture it with backend=None"
        elif any(isinstance(n, Size) for bound in ready.parts.values() for n in _sizes(bound)):
            why = "its program serves batches of many sizes. Write it before batches of other sizes have run"
        if why:
            raise ProgramError(f"step.to_python: this step cannot be written: {why}")

    # -- inputs -----------------------------------------------------------------------------------------

    def _batch(self, bound: BoundProgram, names: ValueNames) -> list[str]:
        """The lines that cut the batch."""
        code, lines = dict(self._batch_code(bound)), []
        for i, (given, node) in enumerate(zip(bound.program.inputs, bound.program.placeholders, strict=True)):
            if given.kind in PASSED:
                names.texts[node] = names.fresh(given.name)
                lines.append(f"    {names.of(node)} = given.pop({json.dumps(given.name)})")
            if given.kind == "batch":
                names.texts[node] = names.fresh(given.name.replace("batch.", "batch_"))
                if node.users or node in bound.program.results:
                    lines.append(f"    {names.of(node)} = {code[i]}")
        return lines

    def _key(self, bound: BoundProgram, i: int) -> str:
        """Of a tensor of the state: its name; sums of other shapes of gradients have further words."""
        given = bound.program.inputs[i]
        if given.kind != "accumulator":
            return given.name
        sums = bound.carrier.sums
        return f"{next(name for name, t in sums.items() if t is bound.inputs[i])}.sum"

    def _keys(self, bound: BoundProgram) -> dict[fx.Node, str]:
        """Node of an input to the key of its tensor."""
        nodes, inputs = bound.program.placeholders, bound.program.inputs
        return {n: self._key(bound, i) for i, n in enumerate(nodes) if inputs[i].kind not in ("batch", *PASSED)}

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors by key, as they are now."""
        made: dict[str, Tensor] = {}
        for bound in self.parts.values():
            for _, held, copy in bound.copied:
                copy.copy_(held.detach())
            for group, number in bound.numbers:
                number.fill_(float(bound.carrier.optimizer.param_groups[group]["lr"]))
            for i, (given, t) in enumerate(zip(bound.program.inputs, bound.inputs, strict=True)):
                if given.kind not in ("batch", *PASSED):
                    made[self._key(bound, i)] = _alone(t)
        return made

    def _batch_code(self, bound: BoundProgram) -> Iterator[tuple[int, str]]:
        made = []
        for i, leaf, spec, value in bound.batch:
            code = f"batch{self.paths[leaf]}"
            if spec is not None:
                code += self._cut(spec)
                code += "" if value.given is not None else ".contiguous()"
            if value.given is not None:
                code = f"{self.bundle.add(helpers.strided)}({code}, {tuple(value.strides)})"
            made.append((i, code))
        return iter(made)

    def _cut(self, spec: Spec) -> str:
        """This rank's part of a global tensor."""
        steps = plan_conversion(Spec(spec.shape, spec.dtype, Layout(spec.mesh)), spec.invariant()).steps
        code = ""
        for dim, n in enumerate(spec.shape):
            shape = [1] * len(spec.shape)
            shape[dim] = n
            numbers = torch.arange(n).view(shape).expand(spec.shape).contiguous()
            with torch.no_grad():
                mine = apply(steps, numbers)
            if mine.shape[dim] == n or not n:
                continue
            own = mine.movedim(dim, 0).reshape(mine.shape[dim], -1)[:, 0].tolist() if mine.numel() else []
            length, first = mine.shape[dim], own[0] if own else 0
            if own and own != list(range(first, first + length)):
                code += f".index_select({dim}, torch.tensor({own}))"
            else:
                code += f".narrow({dim}, {first}, {length})"
        return code

    # -- text -------------------------------------------------------------------------------------------

    def lines(self, path: Path) -> Iterator[str]:
        """The file."""
        mesh = self.mesh
        axes = " x ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True))
        yield f'"""A training step of one rank of {mesh.size} ({axes}), written by Meshwright. It needs only torch.'
        yield ""
        yield f"torchrun --nproc-per-node {mesh.size} {path.name} BATCHES.pt  trains on a list of global batches."
        yield f"{path.stem}.rank0.pt, {path.stem}.rank1.pt, ... have the tensors of each rank: weights, states and lr.*"
        yield '"""'
        yield ""
        yield "from __future__ import annotations"
        yield ""
        imports = {"import sys", "import torch", "import torch.distributed as dist", *self.bundle.imports}
        imports |= {"from pathlib import Path", "from typing import Any", "import os"}
        yield from sorted(imports, key=lambda line: (line.startswith("from"), line))
        yield ""
        yield "aten = torch.ops.aten"
        yield f'DEVICE = "{mesh.device}"' if mesh.device == "cpu" else "DEVICE = f\"cuda:{os.environ['LOCAL_RANK']}\""
        yield f"MESH = {json.dumps(dict(zip(mesh.axes, mesh.sizes, strict=True)))}  # axis to its number of ranks"
        yield from (f"{name} = None  # the process group over {axes}" for axes, name in self.groups.items())
        yield "Tensor = torch.Tensor"
        yield from ["", ""]
        for bound, definitions, cuts, body, returned in self.bodies:
            for _, lines in definitions:
                yield from [*lines, "", ""]
            parameters = "w, batch, given" if self.how is not None else "w, batch"
            yield f"def {self.names[id(bound)]}({parameters}):"
            yield f'    """{"Train on" if bound.program.update else "Run"} a batch; return the loss."""'
            yield from [*cuts, *body, *returned, "", ""]
        yield from self.stages
        yield from self._cycle()
        yield "# What the functions above call, and how the file starts."
        for keys, name in self.lists.items():
            yield from wrapped(f"{name} = [", ", ".join(json.dumps(key) for key in keys), "]", always=True)
        for source in self.bundle.sources:
            yield from ["", "", *source.splitlines()]
        yield from ["", ""]
        yield from self._start()

    def _returned(self, bound: BoundProgram, function: Function) -> Iterator[str]:
        """The loss, reduced; other values as this rank has them; gradients into the state."""
        program, out = bound.program, []
        if self.how is not None and any(o.kind in ("held", "edge", "gathered", "reduced") for o in program.outputs):
            pairs = {o.name: function.text(n) for o, n in zip(program.outputs, program.results, strict=True)}
            yield from wrapped("    return {", ", ".join(f"{json.dumps(k)}: {v}" for k, v in pairs.items()), "}")
            return
        for o, node in zip(program.outputs, program.results, strict=True):
            text = function.text(node)
            if o.kind == "grad":
                yield f'    w["{o.name}.grad"] = {text}'
            elif o.kind in ("loss", "aux"):
                out.append(self._reduced(text, o.spec, value_of(node)))
        empty = "{}" if self.how is not None else "None"
        yield f"    return {', '.join(out) or empty}"

    def _reduced(self, text: str, spec: Spec | None, value: Any) -> str:
        if spec is None or not spec.layout.partial:
            return text
        steps = plan_conversion(spec, Spec(spec.shape, spec.dtype, Layout(spec.mesh))).steps
        for step in steps:
            axes = ",".join(self.mesh.axes[a] for a in step.axes)
            if step.kind != "all_reduce":
                continue
            group = self.groups.setdefault(axes, re.sub(r"\W", "_", axes).upper())
            few = few_in_order(self.mesh, value, axes)
            op = next(p.op for a in step.axes if (p := step.src.layout.placements[a]) and hasattr(p, "op"))
            name = self.bundle.add(helpers.all_reduce_in_order if few and op == "sum" else helpers.all_reduce)
            text = f'{name}({text}, "{op}", {group})'
        return text

    def _cycle(self) -> Iterator[str]:
        if self.how is not None or len(self.parts) == 1:
            return
        order = [self.names[id(b)] for b in self.ready.schedules[STEP]]
        yield f"CALLS = [{', '.join(order)}]  # the last one updates"
        yield from [f"done = {self.done}", "", ""]
        yield from ["def step(w, batch):", '    """A micro-step; the last of a cycle updates."""', "    global done"]
        yield from ["    call, done = CALLS[done], (done + 1) % len(CALLS)", "    return call(w, batch)", "", ""]

    def _start(self) -> Iterator[str]:
        yield "def load():"
        yield '    """Join the process group; this rank\'s tensors."""'
        if self.groups:
            yield f"    global {', '.join(self.groups.values())}"
        backend = "gloo" if self.mesh.device == "cpu" else "nccl"
        yield "    if not dist.is_initialized():"
        yield f'        dist.init_process_group("{backend}")'
        if self.mesh.device != "cpu":
            yield "    torch.cuda.set_device(DEVICE)"
        for axes, group in self.groups.items():
            yield f"    {group} = mesh_group({', '.join(json.dumps(a) for a in axes.split(','))})"
        yield "    path = Path(__file__)"
        yield '    stem = path.name.removesuffix(".py").removesuffix(f".rank{dist.get_rank()}")'
        yield '    return torch.load(path.with_name(f"{stem}.rank{dist.get_rank()}.pt"), weights_only=True)'
        yield from [
            "",
            "",
            "def main():",
            '    """Train on the batches of a file; print each loss."""',
            "    w = load()",
        ]
        yield "    with torch.no_grad():"
        yield "        for batch in torch.load(sys.argv[1], weights_only=True):"
        yield "            loss = step(w, batch)"
        yield "            if dist.get_rank() == 0:"
        yield "                print(loss)"
        yield "    if len(sys.argv) > 2:"
        yield '        torch.save(w, f"{sys.argv[2]}.rank{dist.get_rank()}.pt")'
        yield "    dist.destroy_process_group()"
        yield from ["", "", 'if __name__ == "__main__":', "    main()"]


def _sizes(bound: BoundProgram) -> Iterator[Any]:
    """The sizes of the batch's tensors, as the program has them."""
    for given, node in zip(bound.program.inputs, bound.program.placeholders, strict=True):
        if given.kind == "batch":
            yield from checked_value(node).shape


def _accessor(keys: Sequence[Any]) -> str:
    """How a leaf of a batch is read."""
    text = ""
    for key in keys:
        place = getattr(key, "key", getattr(key, "idx", None))
        if place is None:
            raise ProgramError(f"step.to_python: {key} is no place in a tuple, list or dict")
        text += f"[{place!r}]"
    return text


def _alone(t: Tensor) -> Tensor:
    """A tensor that shares memory with none, laid out as it is."""
    t = t.detach()
    return t.clone() if torch.empty_like(t).stride() == t.stride() else torch.empty_strided(
        t.shape, t.stride(), dtype=t.dtype, device=t.device
    ).copy_(t)  # fmt: skip


def _odd(program: Program) -> set[str]:
    """Nodes whose kernels give other strides than the program says: each is run once, alone, on zeros."""
    odd = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in _NOT_TRIED or not makes(node):
            continue
        value, made = value_of(node), _alone_on_zeros(node, program.mesh.device)
        if value is not None and isinstance(made, Tensor) and made.stride() != value.strides:
            odd.add(node.name)
    return odd


def _alone_on_zeros(node: fx.Node, device: str) -> Any:
    """What a kernel makes of zeros; None of arguments that are no tensors, and where zeros are no arguments of it."""
    tensors = {n: v for n in node.all_input_nodes if (v := value_of(n)) is not None}
    if len(tensors) != len(node.all_input_nodes):
        return None
    target: Any = node.target
    with torch.no_grad():
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: zeros(tensors[n], device))
        try:
            return target(*args, **kwargs)
        except (RuntimeError, IndexError):
            return None


def _merged(texts: Sequence[Sequence[str]], mesh: Mesh) -> list[str] | None:
    """One file for all ranks, with the numbers of each where they differ; None where more does."""
    if len({len(t) for t in texts}) > 1:
        return None
    made = []
    for lines in zip(*texts, strict=True):
        if len(set(lines)) > 1:
            code = [line.partition("  # ") for line in lines]
            if len({c for c, _, _ in code}) > 1:
                if len({_LITERAL.sub("0", c) for c, _, _ in code}) > 1:
                    return None
                found = iter([_LITERAL.findall(c) for c, _, _ in code])
                columns = list(zip(*found, strict=True))
                at = iter(columns)

                def chosen(match: re.Match[str]) -> str:
                    values = next(at)  # noqa: B023
                    return _of_ranks(values, mesh)

                text = _LITERAL.sub(chosen, code[0][0])
            else:
                text = code[0][0]
            made.append(text + code[0][1] + code[0][2])
        else:
            made.append(lines[0])
    return made


def _of_ranks(values: Sequence[str], mesh: Mesh) -> str:
    """A number that may differ between ranks; by its place on one axis, where that says it."""
    if len(set(values)) == 1:
        return values[0]
    for axis, name in enumerate(mesh.axes):
        by_place: dict[int, set[str]] = {}
        for rank, value in zip(mesh.ranks, values, strict=True):
            by_place.setdefault(mesh.coordinate(rank)[axis], set()).add(value)
        if all(len(found) == 1 for found in by_place.values()):
            return f'along("{name}", {", ".join(found.pop() for _, found in sorted(by_place.items()))})'
    return f"by_rank({', '.join(values)})"


__all__ = ["to_python"]
