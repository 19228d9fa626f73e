"""Whether a program is well formed: what it says of its values, layouts and collectives is what its nodes do.

Every check reads the program only; none runs it or needs other ranks, but :func:`verify_together`, which is given the
programs of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
import torch.fx as fx

from ...collective import ADDS, ALL_REDUCE, COLLECTIVES, Cut, Kind, differing, mesh_text
from ...collective.graph import KEEP_ONE
from ...errors import DesyncError, ProgramError
from ...layout import REDUCE_OPS, Layout, Partial, Placement, Shard, Spec, wire_name
from ...mesh import Mesh
from ...resharding.record import Record
from ..ir.inplace import written
from ..ir.nodes import Value, checked_value, info_of, is_mutating, value_of
from ..ir.program import PASSED, PIPELINE, WHOLE, Program
from .facts import CAPTURED, program_facts
from .flow import check_gradients
from .values import check_values, described

ROLES = ("forward", "recomputation", "backward", "optimizer")
KINDS = ("param", "buffer", "batch", "constant", "state", "hyper", "accumulator", "scale", *PASSED)
# Who may write to an input of which kind.
_WRITERS = {
    "param": {"optimizer"},  # and, noted of its nodes, the forward of the user
    "state": {"optimizer"},
    "scale": {"optimizer"},
    "buffer": set(ROLES),
    "accumulator": set(ROLES),
    "reduced": set(ROLES),
    "batch": {"forward"},  # a model that writes to what it is given
    "constant": {"forward", "recomputation"},  # tensors from outside of the model, which a step may write to
}


def verify(program: Program) -> None:
    """Check one rank's program, its parts and its schedules.

    Raises:
        ProgramError: what is wrong, and at which node.
    """
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise ProgramError(f"the graph is broken: {error}") from error
    _check_interface(program)
    _check_nodes(program)
    check_values(program)
    _check_collectives(program)
    check_gradients(program)
    for name, part in program.parts.items():
        try:
            verify(part)
        except ProgramError as error:
            raise ProgramError(f"the part {name}: {error}") from error
    known = {WHOLE, *program.parts, *([] if program.pipeline is None else [PIPELINE])}
    for name, runs in program.schedules.items():
        unknown = [part for part in runs if part not in known]
        if unknown or not runs:
            raise ProgramError(f"the schedule {name} runs {unknown[0] if unknown else 'nothing'}, which is no part")


def verify_together(programs: Sequence[Program]) -> None:
    """Check the programs of all ranks of a mesh, each alone and all together.

    Raises:
        ProgramError: a program that is not well formed.
        DesyncError: ranks that would not meet: another collective, another order, shapes that do not fit.
    """
    mesh = programs[0].mesh
    by_rank = {p.rank: p for p in programs}
    if any(p.mesh != mesh for p in programs) or sorted(by_rank) != sorted(mesh.ranks) or len(programs) != mesh.size:
        given = ", ".join(f"rank {p.rank} of {p.mesh!r}" for p in programs)
        raise ProgramError(f"one program for each rank of one mesh was expected, not {given}")
    for p in programs:
        try:
            verify(p)
        except ProgramError as error:
            raise ProgramError(f"rank {p.rank}: {error}") from error
    _check_meetings([by_rank[r] for r in mesh.ranks])
    _check_holders([by_rank[r] for r in mesh.ranks])


# ---------------------------------------------------------------------------------------------- inputs and outputs


def _check_interface(program: Program) -> None:
    nodes, results = program.placeholders, program.results
    if len(nodes) != len(program.inputs):
        raise ProgramError(f"the graph has {len(nodes)} inputs, the program lists {len(program.inputs)}")
    if len(results) != len(program.outputs):
        raise ProgramError(f"the graph gives {len(results)} results, the program lists {len(program.outputs)} outputs")
    here = program.mesh.coordinate(program.rank)
    names = {i.name for i in program.inputs if i.kind == "param"}
    for node, given in zip(nodes, program.inputs, strict=True):
        where = f"input {given.kind} {given.name} (%{node.name})"
        if given.kind not in KINDS:
            raise ProgramError(f"{where}: its kind is one of {', '.join(KINDS)}")
        value = value_of(node)
        if value is None:
            raise ProgramError(f"{where}: its shape and dtype are not recorded")
        _check_spec(where, given.spec, value, here, dtype=given.kind != "accumulator")
        if given.kind == "state" and given.owner not in names:
            raise ProgramError(f"{where} belongs to {given.owner!r}, which is no parameter of the program")
        if given.kind == "constant":
            _check_constant(where, program.constants.get(given.name), value)
    twice = [k for k, n in Counter((i.kind, i.name) for i in program.inputs).items() if n > 1]
    if twice:
        raise ProgramError(f"input {' '.join(twice[0])} is listed twice")
    for node, out in zip(results, program.outputs, strict=True):
        where = f"output {out.kind} {out.name} (%{node.name})"
        value = value_of(node)
        if value is None:
            raise ProgramError(f"{where}: not one tensor")
        _check_spec(where, out.spec, value, here)


def _check_constant(where: str, held: Any, value: Value) -> None:
    if not isinstance(held, torch.Tensor):
        raise ProgramError(f"{where}: the program does not hold this constant")
    if tuple(held.shape) != value.shape or held.dtype is not value.dtype:
        raise ProgramError(
            f"{where} is said to be {value.dtype} {list(value.shape)}, it is {held.dtype} {list(held.shape)}"
        )


def _check_spec(where: str, spec: Spec | None, value: Value, here: tuple[int, ...], *, dtype: bool = True) -> None:
    """What a rank holds must be its part of the global value."""
    if spec is None:
        return
    shape = _local_shape(spec, here)
    if shape != value.shape:
        raise ProgramError(
            f"{where}: {spec!r} means {list(shape)} on the rank at {here}, but the value has shape {list(value.shape)}"
        )
    if dtype and spec.dtype is not value.dtype:
        raise ProgramError(f"{where}: the layout is that of {spec.dtype}, the value is {value.dtype}")


@lru_cache(maxsize=4096)
def _local_shape(spec: Spec, here: tuple[int, ...]) -> tuple[int, ...]:
    return spec.local_shape(here)


# ---------------------------------------------------------------------------------------------- nodes


def _check_nodes(program: Program) -> None:
    """Roles, layouts of the user's values, and who writes to the program's inputs."""
    here = program.mesh.coordinate(program.rank)
    owned: dict[int, tuple[str, str]] = {}
    for node, given in zip(program.placeholders, program.inputs, strict=True):
        owned[checked_value(node).storage] = (given.kind, given.name)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            raise ProgramError(f"%{node.name} is a {node.op}: a program consists of calls of functions")
        info = info_of(node)
        role, cause = info.role, info.cause
        if role not in ROLES:
            raise ProgramError(f"{described(node)} has the role {role!r}: one of {', '.join(ROLES)} was expected")
        if info.value is None and node.users:
            raise ProgramError(f"{described(node)}: what it gives is not recorded")
        if cause is not None and not 0 <= cause < len(program.causes):
            raise ProgramError(f"{described(node)} serves conversion {cause}; there are {len(program.causes)}")
        if isinstance(info.value, Value):
            _check_spec(described(node), info.spec, info.value, here)
        if is_mutating(node):
            for storage in written(node):
                kind, name = owned.get(storage, ("", ""))
                own = role == "forward" and kind == "param" and info.writes
                if kind and role not in _WRITERS.get(kind, ()) and not own:
                    raise ProgramError(f"{described(node)}, which is part of the {role}, writes to {kind} {name}")


# ---------------------------------------------------------------------------------------------- collectives


def _check_collectives(program: Program) -> None:
    mesh, text = program.mesh, mesh_text(program.mesh)
    served: dict[int, list[tuple[str, str]]] = {}
    for node in program.graph.nodes:
        if node.target not in COLLECTIVES:
            continue
        kind = COLLECTIVES[node.target]
        *options, axes, on = node.args[1:]
        where = described(node)
        if on != text:
            raise ProgramError(f"{where} runs on the mesh {on}, the program is of {text}")
        names = str(axes).split(",")
        unknown = [a for a in names if a not in mesh.axes]
        if unknown or len(set(names)) < len(names):
            raise ProgramError(f"{where} runs over the axes {axes!r}; {mesh!r} has {', '.join(mesh.axes)}")
        value = value_of(node.all_input_nodes[0])
        if value is not None:
            _check_arguments(where, kind, options, value, *_place(mesh, program.rank, axes))
        number = info_of(node).cause
        if number is not None:
            op = str(kind.named(options)["op"]) if kind.reduces else ""
            cause = program.causes[number]
            _check_cause(where, kind, op, options, names, cause)
            if op in ADDS and value is not None:
                _check_summed(where, kind, wire_name(kind.format(value.dtype, options)), cause)
            served.setdefault(number, []).append((kind.name, op))
    _check_served(program, served)


@lru_cache(maxsize=1024)
def _place(mesh: Mesh, rank: int, axes: str) -> tuple[int, int]:
    """Size of the group over these axes, and this rank's index in it."""
    ranks = mesh.group_ranks(rank, sorted(mesh.axis_index(a) for a in axes.split(",")))
    return len(ranks), ranks.index(rank)


def _check_arguments(where: str, kind: Kind, options: Sequence[Any], value: Value, size: int, index: int) -> None:
    """The arguments of a collective against its group and what it is given."""

    def check(cut: Cut, dim: Any, sizes: Any) -> None:
        if not 0 <= dim < len(value.shape):
            raise ProgramError(f"{where}: {cut.verb} dim {dim} of a value of shape {list(value.shape)}")
        if len(sizes) != (size * size if cut.table else size):
            raise ProgramError(f"{where}: {len(sizes)} sizes {list(sizes)} for the {size} ranks of its group")
        have, want = value.shape[dim], cut.before(sizes, size, index)
        if have != want:
            raise ProgramError(f"{where}: sizes {list(sizes)} want {want} in dim {dim} of rank {index}; it has {have}")

    said = kind.named(options)
    if kind.reduces and said["op"] not in REDUCE_OPS:
        raise ProgramError(f"{where}: the reduction {said['op']!r} is none of {', '.join(REDUCE_OPS)}")
    if said.get("index", index) != index:
        raise ProgramError(f"{where}: it is given index {said['index']} in its group; this rank has index {index}")
    for c in kind.cuts:
        check(c, said[c.dim], said[c.sizes])
    if not 0 <= said.get("src_index", 0) < size:
        raise ProgramError(f"{where}: it comes from index {said['src_index']} of a group of {size}")


def _check_cause(where: str, kind: Kind, op: str, options: Sequence[Any], axes: Sequence[str], cause: Record) -> None:
    """A collective against the conversion that it serves."""
    what = f"the conversion {cause.src} -> {cause.dst} of {cause.op}"
    strange = [a for a in axes if a not in cause.axes]
    if strange:
        raise ProgramError(f"{where} runs over {', '.join(axes)}; {what} is over {', '.join(cause.axes) or 'no axis'}")
    src, dst = _by_axis(cause.src), _by_axis(cause.dst)
    ops = {p.op for a in axes if isinstance(p := src.get(a), Partial)}
    # The gradient of a maximum goes to the ranks that hold it: how many they are is summed in the forward (and how many
    # factors of a product are zero).
    ties = kind is ALL_REDUCE and op == "sum" and bool(ops & _WEIGHTED)
    if kind.name not in cause.kinds and not ties:
        raise ProgramError(f"{where}: {what} consists of {' + '.join(cause.kinds) or 'no communication'}")
    if ops and op and op not in ops and not (op == "sum" and "avg" in ops) and not ties:
        raise ProgramError(f"{where} reduces by {op}; {what} is a reduction by {' and '.join(sorted(ops))}")
    if len(cause.kinds) == 1:
        _check_dims(where, kind, options, axes, src, dst, what)


def _check_summed(where: str, kind: Kind, have: str, cause: Record) -> None:
    """In what parts travel to be summed, against what the conversion that it serves says."""
    want = {d for k, d in zip(cause.kinds, cause.dtypes, strict=False) if k == kind.name}
    if want and have not in want:
        raise ProgramError(
            f"{where} sums in {have}; the conversion {cause.src} -> {cause.dst} of {cause.op} sums in "
            f"{' and '.join(sorted(want))}"
        )


def _check_dims(
    where: str,
    kind: Kind,
    options: Sequence[Any],
    axes: Sequence[str],
    src: dict[str, Placement],
    dst: dict[str, Placement],
    what: str,
) -> None:
    """The dims of a collective against the layouts around it, where it is the only one of its conversion."""
    said = kind.named(options)
    for cut in kind.cuts:
        layout = src if cut.joins else dst
        wanted = {p.dim for a in axes if isinstance(p := layout.get(a), Shard)}
        if wanted and said[cut.dim] not in wanted:
            raise ProgramError(
                f"{where} {'joins' if cut.joins else 'splits'} dim {said[cut.dim]}; {what} is about dim "
                f"{' and '.join(map(str, sorted(wanted)))}"
            )


_WEIGHTED = {"max", "min", "product"}


def _by_axis(layout: Layout | str) -> dict[str, Placement]:
    """Axis to placement; nothing of several tensors, which have no layout together."""
    return {} if isinstance(layout, str) else dict(zip(layout.mesh.axes, layout.placements, strict=True))


def _check_served(program: Program, served: dict[int, list[tuple[str, str]]]) -> None:
    """Every conversion that moves data has its collectives."""
    for i, cause in enumerate(program.causes):
        found = served.get(i, [])
        missing = [k for k in cause.kinds if k not in {kind for kind, _ in found}]
        if missing and not (found and _by_extremum(cause)):
            raise ProgramError(
                f"no {' and no '.join(missing)} is left of the conversion {cause.src} -> {cause.dst} of {cause.op}: "
                f"{cause.reason} ({cause.line or 'no line'})"
            )


def _by_extremum(cause: Record) -> bool:
    return any(isinstance(p, Partial) and p.op in _WEIGHTED for p in _by_axis(cause.src).values())


# ---------------------------------------------------------------------------------------------- all ranks


def _check_meetings(programs: Sequence[Program]) -> None:
    """All ranks reach the same collectives in one order, with shapes that fit."""
    mesh = programs[0].mesh
    found, _ = differing({p.rank: program_facts(p) for p in programs})
    if found:
        raise DesyncError(CAPTURED.format(found))
    nodes = {p.rank: list(p.collectives()) for p in programs}
    for p in programs:
        for i, node in enumerate(nodes[p.rank]):
            kind, axes = COLLECTIVES[node.target], str(node.args[-2])
            lead = mesh.group_ranks(p.rank, sorted(mesh.axis_index(a) for a in axes.split(",")))[0]
            mine, theirs = _meeting_shape(kind, node), _meeting_shape(kind, nodes[lead][i])
            if mine != theirs:
                raise DesyncError(
                    f"{described(node)}: rank {p.rank} brings shape {list(mine)}, rank {lead} {list(theirs)} "
                    "(gathered dims aside)"
                )


def _meeting_shape(kind: Kind, node: fx.Node) -> tuple[int, ...]:
    """What of the shape of a collective's input all ranks of its group must have alike."""
    value = value_of(node.all_input_nodes[0])
    shape = list(value.shape) if value is not None else []
    said = kind.named(node.args[1:-2])
    for cut in kind.cuts if shape else ():
        if cut.joins:
            shape[said[cut.dim]] = -1
    return tuple(shape)


def _check_holders(programs: Sequence[Program]) -> None:
    """What one rank of a group keeps, and the others have as zeros, must be kept by somebody."""
    listed = [[n for n in p.graph.nodes if n.target is KEEP_ONE.default] for p in programs]
    for nodes in zip_longest(*listed):
        if None in nodes:
            raise DesyncError("some ranks keep a value that one rank of a group has, where others keep none")
        keepers = sum(bool(n.args[1]) for n in nodes)
        everyone = keepers == len(programs) and 1 not in programs[0].mesh.sizes
        if not keepers or len(programs) % keepers or everyone:
            raise DesyncError(
                f"{described(nodes[0])}: {keepers} of {len(programs)} ranks keep the value; one of each group must"
            )


__all__ = ["verify", "verify_together"]
