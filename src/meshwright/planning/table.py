"""``layouts``: how a model lies on a mesh, from what its step computes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..compat import pytree
from ..errors import CaptureError, LayoutError, takes
from ..layout import LayoutLine, LayoutTable, Placement, Replicate, Shard
from ..machines import Hardware
from ..mesh import Mesh
from ..planner import FoundPlan, plan
from ..planner.folding import folded
from ..program.capture.export import Captured, LossFn, capture, leaf_names
from ..program.capture.fakes import writing_nothing
from ..program.ir.nodes import no_collection
from .blocks import captured_blocks
from .choice import Chosen, choose_strands
from .own_plan import own_plan
from .strands import Strands

_ANY = 1e18  # bytes of memory: layouts are compared, whatever fits


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
    hardware: str | Hardware | None = None,
) -> LayoutTable:
    """Find layouts of a model's parameters for a mesh. Nothing is changed, sent or allocated.

    It captures the step of one device and follows dims that ops can shard together: the outputs of one weight, the
    heads, the inputs of the next weight. Such a pair is sharded in the middle (Megatron-LM, Shoeybi et al., 2019), so
    only its end is reduced. Heads and embeddings are sharded over the vocabulary. Dims that would need an all-gather
    stay replicated, and the table says what sharding them would send. A plan that the model has (`base_model_tp_plan`
    of Transformers) wins wherever it sends no more. A step that cannot be captured is planned block by block.

    Args:
        model: A module for one device, or on the meta device.
        mesh: The mesh; it need not be connected.
        batch: Example: a tensor, or nested tuples, lists and dicts of tensors, with global shapes.
        loss_fn: As for [compile_step][meshwright.compile_step].
        data: Axis that shards the batch. It need not exist.
        tensor: Axis that shards parameters. It need not exist.
        hardware: A machine, as for [plan][meshwright.plan]. The notes then list what `plan` chooses for this mesh
            where it differs.

    Returns:
        A [LayoutTable][meshwright.LayoutTable] for `shard_module(model, mesh, table)` and
        `compile_step(layouts=table)`. `print(table)` shows the reason of each line. `table.save("plan.toml")` writes
        it, `mw.load_layouts` reads it.

    Raises:
        CaptureError: If neither the step nor a block can be captured. Names the line.
        LayoutError: If an argument has another type, or the mesh has no such axis.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        table = mw.layouts(net, mesh, torch.ones(4, 8), lambda model, x: model(x).sum())
        assert table["0.weight"] == {"tp": mw.Shard(0)} and table["2.weight"] == {"tp": mw.Shard(1)}
        ```
    """
    for name, axis, usual in (("data", data, "dp"), ("tensor", tensor, "tp")):
        if axis not in (None, usual, *mesh.axes):
            raise LayoutError(f"layouts: {name}={axis!r}: {mesh!r} has the axes {', '.join(mesh.axes)}")
    notes: list[str] = []
    parts = _captured(model, loss_fn, batch, mesh, notes)
    lines = dict.fromkeys((n for n, _ in model.named_parameters()), LayoutLine({}, "not used, or not captured"))
    if tensor in mesh.axes and mesh.sizes[mesh.axis_index(tensor)] > 1:
        own = own_plan(model)
        for prefix, captured in parts.items():
            told = {n.removeprefix(prefix): said for n, said in own.items() if n.startswith(prefix)}
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
    if hardware is not None:
        notes += _planned(plan(model, loss_fn, batch, None, mesh=mesh, hardware=hardware, memory=_ANY), lines)
    axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    names = [*lines, *(n for n, _ in model.named_buffers())]
    return LayoutTable(axes, folded(lines, names), split, tuple(dict.fromkeys(notes)))


def _planned(found: FoundPlan, lines: Mapping[str, LayoutLine]) -> list[str]:
    """What a plan chooses where lines differ, layers that are alike as one."""
    differ: dict[str, list[str]] = defaultdict(list)
    for name, line in lines.items():
        planned = found.plan.placements_of(name)
        split = {a: p for a, p in line.placements.items() if not isinstance(p, Replicate)}
        if planned != split:
            said = ", ".join(f"{a}: {p!r}" for a, p in planned.items()) or "replicated"
            differ[f"{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', name)}: {said}"].append(name)
    if not differ:
        return []
    step = f"{found.step_seconds * 1e3:.3g} ms a step on {found.search.hardware.name}, by estimates"
    alike = [n if len(names) > 1 else f"{names[0]}:{n.partition(':')[2]}" for n, names in differ.items()]
    return [f"mw.plan chooses other layouts ({step}):", *alike]


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


__all__ = ["layouts"]
