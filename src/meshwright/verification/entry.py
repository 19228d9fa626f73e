"""``mw.verify``: the user's own training step on simulated ranks, against one device in float64."""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from os import PathLike
from typing import Any

import torch
import torch.nn as nn

from ..compat import pytree
from ..errors import CaptureError, MeshwrightError, VerifyError, near, takes
from ..layout import Layout, Placements, read_layouts
from ..mesh import Mesh
from ..passes import Pass, PassManager
from ..program import Plan, build
from ..program.capture.export import LossFn
from ..program.capture.optimizers import options_of
from ..program.capture.source_lines import own_loss
from ..program.check.digest import digest_of
from ..shard.optimizers.kinds import own_work
from ..tensor import DistTensor
from .captured import CapturedTraining
from .doubled import doubled
from .journal import Departure, Journal, RankJournal
from .merged import merged
from .report import Coverage, Verification
from .runs import Optimizers, Task, copies
from .sizes import Step, shrink_to_budget, valued
from .steps import named_leaves
from .work import on_meta

Tensor = torch.Tensor
MODES = ("eager", "captured")
LEFT_OUT = {
    "precision": "everything is computed in float64", "loss_scale": "in float64 nothing overflows",
}  # fmt: skip


@takes(
    VerifyError, model=(nn.Module, "give the nn.Module that is trained, as for one device"),
    mesh=(Mesh, 'give a mesh, which need not be connected: mw.Mesh({"dp": 2, "tp": 2})'),
    layouts=((Mapping, str, PathLike, type(None)), 'give a dict, glob of names to placements, or a file of layouts'),
)  # fmt: skip
def verify(
    model: nn.Module,
    loss_fn: LossFn | None,
    example_batch: Any,
    mesh: Mesh,
    layouts: Mapping[str, Placements] | str | PathLike[str] | None = None,
    *,
    optimizer: Optimizers = torch.optim.AdamW,
    passes: Sequence[Pass | str] | PassManager = (),
    modes: Sequence[str] = MODES,
    steps: int = 2,
    save: bool = True,
    seed: int = 0,
    seconds: float = 120.0,
    shrink: bool | None = None,
    **said: Any,
) -> Verification:
    """Train a few steps on simulated ranks and compare every value with one device, in float64.

    It compares loss, every value and its gradient, gradients of parameters, parameters, buffers, optimizer states and
    the random generator after each update. Then it saves, loads into a model with other values, and updates once more.
    The report names the first op that differs, and its line.

    Args: What to verify
        model: As for [compile_step][meshwright.compile_step]. It does not change.
        loss_fn: As for `compile_step`.
        example_batch: As for `compile_step`; its values count.
        mesh: The mesh; only its sizes count.
        layouts: As for `compile_step`.
        optimizer: Optimizer of the model's parameters; or a function that makes one from parameters, needed if it has
            step hooks.
        passes: Passes of the captured step.
        **said: Further `compile_step` options: `batch`, `inputs`, `outputs`, `fsdp`, `shard_states`, `by`,
            `clip_grad_norm` and others.

    Args: How
        modes: `"eager"`, `"captured"` or both.
        steps: Number of updates before the save.
        save: Whether to save and load.
        seed: Seed of the random generator.
        seconds: Approximate time limit in seconds; memory is limited to what is free. A larger step is verified with
            fewer layers of each kind, fewer examples and smaller dims; the report says which.
        shrink: `True`: as small as possible. `False`: as given. Default: by `seconds`.

    Returns:
        A report; `report.passed` is the verdict.

    Raises:
        VerifyError: If the loss is no scalar, the model is sharded already, an option does not exist, or the model does
            not fit and cannot be shrunk.
        LayoutError: As `shard_module` and `compile_step` raise it.
        ShardError: As `shard_module` and `compile_step` raise it.
        CaptureError: As `compile_step` raises it.

    Examples:
        ```python
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        report = mw.verify(
            net, lambda model, x: model(x).square().mean(), torch.ones(4, 4), mw.Mesh({"dp": 2}),
            batch={"dp": mw.Shard(0)}, modes=("eager",), steps=1, save=False,
        )
        assert report.passed, report
        ```
    """
    began, modes = time.monotonic(), (modes,) if isinstance(modes, str) else tuple(modes)
    plan, notes = _plan(layouts, said)
    _check(model, optimizer, example_batch, modes, steps)
    notes += _unused(mesh, plan)
    if plan.strategies and "eager" in modes:
        notes.append(f"not covered by eager steps: strategies={plan.strategies!r}, which captured ones are told")
    manager = passes if isinstance(passes, PassManager) else PassManager(passes)
    digest = _digest(model, loss_fn, optimizer, example_batch, mesh, plan, manager) if "captured" in modes else ""
    step = Step(model, loss_fn or own_loss, optimizer, example_batch, plan)
    step = valued(shrink_to_budget(step, mesh, len(set(modes)), steps + save, seconds, shrink))
    with _in_float64():
        task = _task(step, mesh, manager, steps, save, seed, of_model="captured" in modes)
        found, covered, more = _compared(task, step.loss_fn, dict.fromkeys(modes))
    size = sum(p.numel() for p in model.parameters())
    where = ", ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True))
    title = f"{type(model).__name__} of {size} parameters on {where}, against one device in float64"
    return Verification(
        title, tuple(found), tuple(covered), (*notes, *more), digest, time.monotonic() - began, step.taken
    )  # fmt: skip


def _task(
    step: Step, mesh: Mesh, passes: PassManager, steps: int, save: bool, seed: int, *, of_model: bool
) -> Task:  # fmt: skip
    """What is verified, in float64.  ``of_model``: eager steps leave out layouts of other values than the model's."""
    own, made = copies(step.model, step.optimizer)
    own, plan = own.cpu().double(), step.plan
    optimizer = made if isinstance(step.optimizer, torch.optim.Optimizer) else step.optimizer
    batch = pytree.tree_map(_wide, step.batch)
    laid = _of_model(plan.layouts, own) if of_model else plan.layouts  # which captured steps find
    return Task(own, optimizer, doubled(step.loss_fn), batch, mesh, plan, laid, passes, steps, save, seed)


def _compared(
    task: Task, loss_fn: LossFn, modes: Iterable[str]
) -> tuple[list[Departure], list[Coverage], list[str]]:  # fmt: skip
    """What departs in each mode, what was compared, and notes."""
    found: list[Departure] = []
    covered: list[Coverage] = []
    notes: list[str] = []
    try:
        journal = _on_one(task)
    except VerifyError:  # what is asked for in float32 may be so since an op has nothing else
        task = replace(task, loss_fn=loss_fn)
        journal = _on_one(task)
        notes.append(
            "float32 that the model asks for is rounded to, as an op has no float64: values behind it are compared to "
            "1e-4"
        )
    for mode in modes:
        ranks, departure = _eager(task, journal) if mode == "eager" else _captured(task, journal)
        found += [departure] if departure is not None else []
        notes += [f"without consequence: {d}" for d in (ranks.harmless,) if d is not None]
        covered.append(_covered(ranks))
    if any(c.mode == "captured" for c in covered) and task.passes.calls_per_update > 1 and not found:
        departure, note = merged(task)
        found += [departure] if departure is not None else []
        notes += [note] if note else []
    return found, covered, notes


def _plan(layouts: Any, said: dict[str, Any]) -> tuple[Plan, list[str]]:
    """What was said, as a plan, and what of it is left out.  Raises VerifyError for a word that nobody knows."""
    known = [f.name for f in fields(Plan)]
    for name in said:
        if name not in known:
            raise VerifyError(f"verify has no option {name!r}{near(name, known)}")
    left = [n for n in LEFT_OUT if said.get(n) is not None]
    said.pop("gradients", None)  # which are compared anyhow
    kept = {n: v for n, v in said.items() if n not in left}
    notes = [f"not covered: {n}={said[n]!r}: {LEFT_OUT[n]}" for n in left]
    return Plan(layouts=read_layouts(layouts) or {}, **kept), notes


def _of_model(layouts: Mapping[str, Placements], model: nn.Module) -> dict[str, Placements]:
    """Layouts without those that captured steps alone know: of the batch, and of values of the program."""
    own = [n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    return {g: p for g, p in layouts.items() if fnmatch.filter(own, g)}


def _check(model: nn.Module, optimizer: Optimizers, batch: Any, modes: Sequence[str], steps: int) -> None:
    if isinstance(optimizer, torch.optim.Optimizer) and (added := own_work(optimizer)):
        raise VerifyError(
            f"{type(optimizer).__name__} has {added}, which a copy of it has not: give a function that makes it, "
            "optimizer=lambda params: ..."
        )
    laid = next((n for n, t in model.named_parameters() if isinstance(t, DistTensor)), None)
    if laid is not None:
        raise VerifyError(f"{laid} is distributed already: give verify the model as it is for one device")
    for mode in modes:
        if mode not in MODES:
            raise VerifyError(f"modes={modes!r}: {mode!r} is none{near(mode, MODES)}")
    empty = next((n for n, t in named_leaves(batch) if t.is_meta), None)
    if empty is not None:
        raise VerifyError(f"{empty} is on the meta device, and verify trains on it: give a batch with values")
    if steps < 1:
        raise VerifyError(f"steps={steps}: at least one update was expected")


def _unused(mesh: Mesh, plan: Plan) -> list[str]:
    """Axes that nothing that was said splits anything over."""
    said = (plan.layouts, plan.batch, plan.inputs, plan.outputs, plan.fsdp, plan.shard_states)
    used = {a for x in said for a in _splitting(x, mesh)} | {*(plan.stages or ())}
    return [f"no layout names the axis {a!r}: its ranks do the same work" for a in mesh.axes if a not in used]


def _splitting(said: Any, mesh: Mesh) -> Iterator[str]:
    """The axes of placements, of each by its name or its place, and of what has placements or names of axes in it."""
    if isinstance(said, str):
        yield said
        return
    said = said.placements if isinstance(said, Layout) else said
    for axis, x in said.items() if isinstance(said, Mapping) else zip(mesh.axes, said or (), strict=False):
        if isinstance(x, (str, Mapping, Sequence, Layout)):
            yield from _splitting(x, mesh)
        elif x is not None and repr(x) != "Replicate()":
            yield axis


@contextmanager
def _in_float64() -> Iterator[None]:
    before, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(state)


def _wide(x: Any) -> Any:
    return x.detach().cpu().double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _digest(
    model: nn.Module, loss_fn: LossFn | None, optimizer: Optimizers, batch: Any, mesh: Mesh, plan: Plan,
    passes: PassManager,
) -> str:  # fmt: skip
    """Of the first rank's program, of the sizes and dtypes that were given."""
    if isinstance(optimizer, torch.optim.Optimizer):
        own, opt = on_meta((model, optimizer))
    else:
        own = on_meta(model)
        opt = optimizer(own.parameters())
    try:
        made = build(own, loss_fn, opt, batch, mesh, plan, weighing=passes.weighing)
        return digest_of(passes(made.program), made.captured.module, options_of(opt))
    except CaptureError as error:
        raise CaptureError(f"{error} (or verify eager steps alone: modes=['eager'])") from error


def _on_one(task: Task) -> Journal:
    try:
        return task.on_one()
    except MeshwrightError:
        raise
    except (RuntimeError, NotImplementedError) as error:  # of PyTorch's kernels
        raise VerifyError(
            f"verify: in float64 on one device, which all is compared with, the step raised {type(error).__name__}: "
            f"{error}. Where an op has no float64, verify a model that computes the same by other ones: grouped "
            'experts of Transformers, say, after model.set_experts_implementation("batched_mm")'
        ) from error


def _eager(task: Task, journal: Journal) -> tuple[RankJournal, Departure | None]:
    found = RankJournal(journal, "eager")
    task.on_ranks(found, task.eager)
    return found, found.first()


def _captured(task: Task, journal: Journal) -> tuple[RankJournal, Departure | None]:
    model, optimizer = copies(task.model, task.optimizer)
    graph = build(model, task.loss_fn, optimizer, task.batch, task.mesh, task.plan).captured
    own = task.on_one(CapturedTraining, captured=graph)
    found = RankJournal(own, "captured")
    task.on_ranks(found, task.captured)
    return found, _capture_departs(journal, own) or found.first()


def _capture_departs(journal: Journal, own: Journal) -> Departure | None:
    """Where the graph that was captured does something else than the code, on one device."""
    for key, want in journal.seen.items():
        if key[1] not in ("forward", "backward") and key in own.seen:
            off = journal.differing(key, own.seen[key].value)
            if off is not None:
                return Departure(
                    "captured", key[0], "capture", "torch.export", want.line, (), want.name, "",
                    f"the captured graph gives {off.text} on one device", off.relative,
                )  # fmt: skip
    return None


def _covered(found: RankJournal) -> Coverage:
    counts = Counter(str(k[1]) for k in found.compared)
    first = {k: s for k, s in found.journal.seen.items() if k[0] == 0 and k[1] == "forward" and k[-2] == "out"}
    missed = [s for k, s in first.items() if k not in found.compared and not s.folded]
    said = dict.fromkeys(f"{s.op} at {s.line}" for s in missed)
    return Coverage(found.mode, dict(counts), tuple(said))
