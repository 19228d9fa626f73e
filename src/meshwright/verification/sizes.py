"""Sizes of a step that are taken down, so that it can be verified here: layers, the batch, dims of the model.

Each is tried on a copy, and what the step does not run with stays as it was.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn as nn

from ..compat import pytree
from ..errors import VerifyError
from ..layout import Shard
from ..mesh import Mesh
from ..program import Plan
from ..program.capture.build import batch_placements
from ..program.capture.export import leaf_names
from .dims import smaller, with_values
from .work import Need, Work, memory, on_meta, work_of

Tensor = torch.Tensor
LAYERS = 2  # of each kind stay, so that there is one behind another
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Step:
    """What is verified: as it was given, or smaller.

    Attributes:
        model, loss_fn, batch, plan: of the step.
        optimizer: of the model's parameters, or what makes one.
        taken: what was taken down, in words.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any]
    optimizer: Any
    batch: Any
    plan: Plan
    taken: tuple[str, ...] = ()

    @property
    def work(self) -> Work:
        """Of one forward."""
        return work_of(self.model, self.loss_fn, self.batch)


def shrink_to_budget(step: Step, mesh: Mesh, modes: int, updates: int, seconds: float, shrink: bool | None) -> Step:
    """A step whose verification takes no more than some seconds, about, and the memory that is free.

    Args:
        shrink: True: as small as it gets; False: as it is.

    Raises:
        VerifyError: it does not fit into memory, whatever is taken down; with what to give.
    """
    if shrink is False:
        return step
    try:
        first = need = _need(step, mesh, modes, updates)
    except Exception:  # of the user's code: the step itself says it, with its line
        return step
    free, notes = memory(), list[str]()
    for less in (fewer_layers, smaller_batch, smaller_dims):
        if shrink is None and need.seconds <= seconds and need.bytes <= free:
            break
        try:
            made = less(step, mesh)
            if made is not None:
                need = _need(made, mesh, modes, updates)
                step = made
        except Exception as error:  # of the user's code, with sizes that it does not take
            notes.append(f"{less.__name__.replace('_', ' ')} do not fit this step: {type(error).__name__}: {error}")
    if need.bytes > free:
        tried = "".join(f"; {n}" for n in (*step.taken, *notes))
        raise VerifyError(
            f"to verify {type(step.model).__name__} takes about {need}, and {free / 1e9:.1f} GB are free{tried}. Give "
            "a model of the same code with fewer layers and smaller dims (those that are split divisible as before), "
            "or a smaller batch; shrink=False tries all the same"
        )
    if need.seconds > seconds and shrink is None:
        notes.append(f"it takes about {need}, more than seconds={seconds:.0f}: give a smaller model")
    why = [f"as it was given it would take about {first}"] if step.taken and shrink is None else []
    return replace(step, taken=(*why, *step.taken, *notes))


def _need(step: Step, mesh: Mesh, modes: int, updates: int) -> Need:
    return Need.of(step.work, mesh.size, modes, updates)


# ---------------------------------------------------------------------------------------------- layers


def fewer_layers(step: Step, mesh: Mesh) -> Step | None:
    """Of blocks of one list that are alike the first :data:`LAYERS`; None where nothing repeats.

    Alike are blocks of the same modules, shapes and numbers, of which the same is said.  They keep their names.
    """
    lists = {n: kept for n, m in _lists(step.model) if len(kept := _first_blocks(step, n, m)) < len(m._modules)}
    if not lists:
        return None
    gone = {
        f"{n}.{key}" for n, kept in lists.items() for key in step.model.get_submodule(n)._modules if key not in kept
    }
    stays = [t for n, t in _tensors(step.model) if not any(n.startswith(f"{g}.") for g in gone)]
    instance = isinstance(step.optimizer, torch.optim.Optimizer)
    model, optimizer = on_meta((step.model, step.optimizer), stays) if instance else (on_meta(step.model, stays), None)
    said = []
    for name, kept in lists.items():
        blocks = model.get_submodule(name)
        count = len(blocks._modules)
        for key in [k for k in blocks._modules if k not in kept]:
            del blocks._modules[key]
        _follow(model, count, [int(k) if k.isdigit() else i for i, k in enumerate(kept)])
        said.append(f"{name}: {len(kept)} of {count} blocks ({', '.join(kept)})")
    plan, lost = _narrowed(step.plan, step.model, model)
    said += [f"of {len(lost)} globs that name other blocks nothing is verified: {', '.join(lost[:3])}"] if lost else []
    if optimizer is not None:
        _forget(optimizer, model)
    return replace(
        step, model=model, plan=plan, optimizer=step.optimizer if optimizer is None else optimizer,
        taken=(*step.taken, *said),
    )  # fmt: skip


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _lists(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Lists of modules that are in no other list."""
    for key, child in model.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > LAYERS:
            yield path, child
        else:
            yield from _lists(child, path)


def _first_blocks(step: Step, name: str, blocks: nn.Module) -> list[str]:
    """Keys of the first blocks of each kind."""
    counted: dict[Any, int] = {}
    kept, indices = [], set(_indices(blocks))
    for key, block in blocks._modules.items():
        kind = _kind(step.plan, f"{name}.{key}", block, indices)
        counted[kind] = counted.get(kind, 0) + 1
        if counted[kind] <= LAYERS:
            kept.append(key)
    return kept


def _indices(blocks: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of modules in blocks, and of their attributes, that say of each block which it is."""
    tables = [
        {(n, k): v for n, m in block.named_modules() for k, v in vars(m).items() if type(v) is int}
        for block in blocks._modules.values() if block is not None
    ]  # fmt: skip
    for key in tables[0]:
        if all(table.get(key, i) == i for i, table in enumerate(tables)):
            yield key


def _kind(plan: Plan, path: str, block: nn.Module | None, indices: Container[tuple[str, str]]) -> Any:
    """What tells kinds of blocks apart: not the attributes that say which of all it is."""
    if block is None:
        return None
    parts: list[Any] = []
    for name, module in block.named_modules():
        numbers = {k: _plain(v) for k, v in vars(module).items() if (name, k) not in indices}
        own = [(k, tuple(t.shape), t.dtype, t.requires_grad) for k, t in _tensors(module)]
        full = f"{path}.{name}" if name else path
        said = [_said(plan, n) for n in (full, *(f"{full}.{k}" for k, *_ in own))]
        parts.append((name, type(module), repr(sorted(numbers.items())), tuple(own), repr(said)))
    return tuple(parts)


def _plain(x: Any) -> Any:
    """What tells an attribute of a module from that of another one: numbers, texts, functions, how many hooks."""
    if isinstance(x, (list, tuple)):
        return [_plain(y) for y in x]
    if isinstance(x, Mapping):
        return len(x)
    return x if isinstance(x, _PLAIN) else getattr(x, "__qualname__", type(x).__qualname__)


def _globs(plan: Plan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Options that are said by names of the model."""
    for f in fields(plan):
        value = getattr(plan, f.name)
        if isinstance(value, Mapping) and f.name not in ("batch", "strategies", "stages"):
            yield f.name, value


def _said(plan: Plan, name: str) -> list[Any]:
    return [(option, v) for option, globs in _globs(plan) for g, v in globs.items() if fnmatch.fnmatchcase(name, g)]


def _narrowed(plan: Plan, before: nn.Module, after: nn.Module) -> tuple[Plan, list[str]]:
    """The plan without globs that only blocks were meant by which are gone, and those globs."""
    was, now = ([n for n, _ in (*_tensors(m), *m.named_modules())] for m in (before, after))
    lost, made = list[str](), dict[str, Any]()
    for option, globs in _globs(plan):
        gone = [g for g in globs if fnmatch.filter(was, g) and not fnmatch.filter(now, g)]
        lost += gone
        made[option] = {g: v for g, v in globs.items() if g not in gone}
    return replace(plan, **made), lost


def _follow(model: nn.Module, count: int, kept: list[int]) -> None:
    """Have configurations say the layers that there are: their number, and lists of one entry for each."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        for key, value in list(getattr(config, "__dict__", {}).items()):
            if isinstance(value, list) and len(value) == count and max(kept) < count:
                setattr(config, key, [value[i] for i in kept])
            elif type(value) is int and value == count and "layer" in key:
                setattr(config, key, len(kept))


def _forget(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take out of an optimizer what is no parameter of the model any more."""
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in own]
    optimizer.param_groups = [g for g in optimizer.param_groups if g["params"]]
    for p in [p for p in optimizer.state if id(p) not in own]:
        del optimizer.state[p]


# ---------------------------------------------------------------------------------------------- batch, dims


def smaller_batch(step: Step, mesh: Mesh) -> Step | None:
    """Fewer examples, and of batches of numbers of tokens shorter ones; None where they are few or do not agree.

    Of dims that mesh axes split what is left over of an even split stays left over.
    """
    flat, tree = pytree.tree_flatten(step.batch)
    leaves = [x for x in flat if isinstance(x, Tensor) and x.ndim]
    cuts: dict[int, tuple[int, int]] = {}
    for dim, least in ((0, 2), (1, 32)):
        sizes = {x.shape[dim] if x.ndim > dim else 0 for x in leaves}
        if len(sizes) != 1 or (dim and any(x.is_floating_point() for x in leaves)):
            break
        size = sizes.pop()
        ways = mesh.size if dim else _ways(step, mesh)
        new = math.ceil(least / ways) * ways + size % ways
        if new < size:
            cuts[dim] = size, new
    if not cuts:
        return None

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim:
            for dim, (_, new) in cuts.items():
                x = x.narrow(dim, 0, new)
            return x.contiguous()
        return x

    said = [f"the batch: {new} of {size} along dim {dim}" for dim, (size, new) in cuts.items()]
    return replace(step, batch=pytree.tree_unflatten([cut(x) for x in flat], tree), taken=(*step.taken, *said))


def _ways(step: Step, mesh: Mesh) -> int:
    """Into how many parts the batch is split."""
    names = leaf_names(step.batch)
    said = batch_placements(step.plan.batch, names, mesh)
    axes = {a for given in said.values() if isinstance(given, Mapping) for a in given}
    return math.prod(mesh.axis_size(a) for a in axes)


def smaller_dims(step: Step, mesh: Mesh) -> Step | None:
    """The model made anew from its own configuration, with smaller dims; None where it has none that says them."""
    made = smaller(step.model, mesh)
    if made is None:
        return None
    model, said = made
    return replace(
        step, model=model, plan=_in_blocks(step, model), optimizer=_moved(step, model), taken=(*step.taken, said)
    )


def _in_blocks(step: Step, model: nn.Module) -> Plan:
    """The plan with the lengths of blocks (of a dim that is split by them) as the smaller dims have them."""
    old, new = dict(_tensors(step.model)), dict(_tensors(model))
    layouts, changed = step.plan.layouts, dict[str, Any]()
    for glob, placements in layouts.items():
        names = fnmatch.filter(old, glob)
        for axis, p in placements.items() if isinstance(placements, Mapping) else ():
            if isinstance(p, Shard) and p.blocks and names:
                now, before = (t[names[0]].shape[p.dim] for t in (new, old))
                if any(n * now % before for n in p.blocks):
                    raise VerifyError(f"the blocks of {glob}, {p.blocks}, have no such lengths in {now}")
                blocks = tuple(n * now // before for n in p.blocks)
                changed[glob] = {**changed.get(glob, placements), axis: Shard(p.dim, blocks)}
    return replace(step.plan, layouts={**layouts, **changed}) if changed else step.plan


def valued(step: Step) -> Step:
    """A step whose model has values.  Raises VerifyError for one on the meta device which says none."""
    model = with_values(step.model)
    return step if model is step.model else replace(step, model=model, optimizer=_moved(step, model))


def _moved(step: Step, model: nn.Module) -> Any:
    """The optimizer, of the parameters of another model by their names."""
    if not isinstance(step.optimizer, torch.optim.Optimizer):
        return step.optimizer
    old, optimizer = on_meta((step.model, step.optimizer))
    names, own = {id(p): n for n, p in old.named_parameters()}, dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [own[names[id(p)]] for p in group["params"]]
    optimizer.state.clear()
    return optimizer


__all__ = ["Step", "shrink_to_budget", "valued"]
