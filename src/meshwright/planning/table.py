"""``layouts``: how a model lies on a mesh, from what its step computes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..compat import pytree
from ..errors import CaptureError, LayoutError, takes
from ..layout import LayoutLine, LayoutTable, Placement, Shard
from ..mesh import Mesh
from ..program.capture.export import Captured, LossFn, capture, leaf_names
from ..program.capture.fakes import writing_nothing
from ..program.ir.nodes import no_collection
from .blocks import captured_blocks
from .choice import Chosen, choose_strands
from .own_plan import own_plan
from .strands import Strands


@takes(
    LayoutError,
    model=(nn.Module, "give the nn.Module that is trained"),
    mesh=(Mesh, 'give a mesh: mw.Mesh({"dp": 2, "tp": 2}) needs no processes'),
)
def layouts(
    model: nn.Module,
    mesh: Mesh,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    data: str | None = "dp",
    tensor: str | None = "tp",
) -> LayoutTable:
    """Find how a model's parameters are best split on a mesh; nothing is changed, sent or allocated.

    The step of one device is captured, and dims that its ops can split together are followed through it: the outputs of
    one weight, the heads, the inputs of the weight that comes after.  Such a pair is split in the middle, as
    Megatron-LM does (Shoeybi et al., 2019), so that only its end is summed; heads and embeddings are split over the
    vocabulary.  What could be split only by gathering values stays whole, and the table says what that would be.
    Names and classes mean nothing to it, but a plan that the model brings itself (``base_model_tp_plan`` of
    transformers) goes first wherever it sends no more.

    Args:
        model: for one device; plain, or on the meta device.
        mesh: need not be connected.
        batch: an example: a tensor, or tuples, lists and dicts of tensors; global shapes.
        loss_fn: as for ``compile_step``; None: the model gives the loss.
        data: axis over which the batch is split.
        tensor: axis over which parameters are split.  Neither ``dp`` nor ``tp`` has to be one of the mesh.

    Returns:
        A mapping from globs to placements, which ``shard_module(model, mesh, table)`` and ``compile_step(...,
        layouts=table)`` take.  Printed it is a table with the reason of each line; ``table.save("plan.toml")`` writes
        it, ``mw.load_layouts`` reads it.

    A step that cannot be captured is taken block by block, where a run of it on one device shows what they are
    called with.

    Raises:
        CaptureError: neither the step nor a block of it can be captured; names the line.
        LayoutError: arguments of another kind, an axis that the mesh does not have.

    Example::

        mesh = mw.Mesh({"dp": 2, "tp": 2})
        table = mw.layouts(model, mesh, batch, loss_fn)
        print(table)
        step = mw.compile_step(model, loss_fn, optimizer, batch, mesh=mesh, layouts=table)
    """
    for name, axis, usual in (("data", data, "dp"), ("tensor", tensor, "tp")):
        if axis not in (None, usual, *mesh.axes):
            raise LayoutError(f"layouts: {name}={axis!r}: {mesh!r} has the axes {', '.join(mesh.axes)}")
    notes: list[str] = []
    parts = _captured(model, loss_fn, batch, mesh, notes)
    lines = dict.fromkeys((n for n, _ in model.named_parameters()), LayoutLine({}, "not used, or not captured"))
    if tensor in mesh.axes and mesh.sizes[mesh.axis_index(tensor)] > 1:
        plan = own_plan(model)
        for prefix, captured in parts.items():
            told = {n.removeprefix(prefix): said for n, said in plan.items() if n.startswith(prefix)}
            strands = Strands(captured, mesh, mesh.axis_index(tensor), returned=bool(prefix))
            chosen = choose_strands(strands, told, pairs=bool(prefix))
            _split(lines, prefix, captured, chosen, tensor)
            notes += chosen.notes
    split, said = _batch(batch, mesh, data)
    notes += said
    used = {a for line in lines.values() for a in line.placements} | ({data} if split else set())
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if axis not in used and size > 1:
            notes.append(f"nothing is split over {axis!r}: its {size} ranks all do the same")
    axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    names = [*lines, *(n for n, _ in model.named_buffers())]
    return LayoutTable(axes, folded(lines, names), split, tuple(dict.fromkeys(notes)))


def _captured(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, mesh: Mesh, notes: list[str]
) -> dict[str, Captured]:
    """The step; where it cannot be captured, those of its blocks that can, by the beginning of their names."""
    with no_collection(), writing_nothing():
        try:
            return {"": capture(model, loss_fn, batch, mesh.device)}
        except CaptureError as error:
            blocks = captured_blocks(model, loss_fn, batch, lambda m, f, b: capture(m, f, b, mesh.device))
            found = {f"{name}.": captured for name, captured in blocks}
            if not found:
                raise
            listed = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name)[:-1] for name in found))
            notes.append(f"found block by block ({listed}), what lies between is whole: {error}")
            return found


def _split(lines: dict[str, LayoutLine], prefix: str, captured: Captured, chosen: Chosen, axis: str) -> None:
    """Write what was chosen into the lines of parameters and buffers."""
    for source in captured.sources:
        key, name = (source.node, 0), prefix + source.name
        if key in chosen.dims and source.kind in ("param", "buffer"):
            split, reason = chosen.dims[key]
            lines[name] = LayoutLine({axis: split}, reason)
        elif source.kind == "param" and not lines[name].placements:  # a tied one comes again under its other name
            lines[name] = LayoutLine({}, chosen.whole.get(key, "nothing to split"))


def _batch(batch: Any, mesh: Mesh, data: str | None) -> tuple[dict[str, Any], list[str]]:
    """Placements of the tensors of the batch: of those that have as many rows as most have."""
    leaves = dict(zip(leaf_names(batch), (x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)), strict=True))
    rows = Counter(t.shape[0] for t in leaves.values() if t.ndim).most_common(1)
    if data not in mesh.axes or mesh.sizes[mesh.axis_index(data)] == 1 or not rows:
        return {}, []
    split = {n.removeprefix("batch."): t.ndim > 0 and t.shape[0] == rows[0][0] for n, t in leaves.items()}
    ways = mesh.sizes[mesh.axis_index(data)]
    notes = [
        f"{n} of the batch is whole: it has not the {rows[0][0]} rows of others" for n, s in split.items() if not s
    ]
    if rows[0][0] < ways:
        notes.append(f"the {rows[0][0]} rows of the batch are fewer than the {ways} ranks of {data!r}")
    said: dict[str, Placement] = {data: Shard(0)}
    return said if all(split.values()) else {n: said if s else {} for n, s in split.items()}, notes


def folded(lines: Mapping[str, LayoutLine], names: Iterable[str]) -> dict[str, LayoutLine]:
    """Lines of layers that are alike as one: numbers in names become ``*`` where that means these names alone."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in lines:
        groups[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)].append(name)
    made, known = {}, {*names, *lines}
    for glob, members in groups.items():
        alike = len({tuple(sorted(lines[n].placements.items())) for n in members}) == 1
        if alike and len(members) > 1 and {n for n in known if fnmatchcase(n, glob)} == {*members}:
            reasons = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", lines[n].reason) for n in members)
            made[glob] = LayoutLine(lines[members[0]].placements, reasons.most_common(1)[0][0])
        else:
            made.update({n: lines[n] for n in members})
    return made


__all__ = ["folded", "layouts"]
