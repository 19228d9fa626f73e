"""A case on simulated ranks of a mesh, eagerly, captured, or by hand."""

from __future__ import annotations

import contextlib
import fnmatch
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright.ranks import runtime

from . import device, program
from .factors import MICRO, MODES, PRECISIONS, STORAGES, UPDATES, Case, short
from .losses import Batch
from .program import Net, Result


def run(made: Case) -> list[Result]:
    """Of each rank: losses, gradients, weights and buffers, global ones."""
    mesh = mw.Mesh(program.axes_of(made))
    with program.default_dtype(made), tempfile.TemporaryDirectory() as folder, _groups(made, mesh):
        table = {"found": _found, "planned": _planned}.get(made["layouts"], lambda *of: None)(made, mesh)
        if made["initial"] == "from a file":
            torch.manual_seed(0)
            mw.save_weights(Net(made, plain=True), f"{folder}/weights")
        return mw.simulate(lambda: Rank(made, mesh, folder, table).run(), mesh)


@contextlib.contextmanager
def _groups(made: Case, mesh: mw.Mesh) -> Iterator[None]:
    """For steps by hand: a process group that sends nothing, while they are captured."""
    if not program.by_hand(made):
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _found(made: Case, mesh: mw.Mesh) -> Any:
    axes = list(program.shared_axes(made))
    batch = turned(made, program.batches(made)[0][0])
    data, tensor = (axes[0], axes[-1]) if len(axes) > 1 else (None, axes[0])
    return mw.layouts(Net(made, plain=False), mesh, batch, lambda m, b: loss_of(made, m, b), data=data, tensor=tensor)


def _planned(made: Case, mesh: mw.Mesh) -> Any:
    """The cheapest plan in which one weight is split, where its block has one that may be."""
    model, batch = Net(made, plain=False), turned(made, program.batches(made)[0][0])
    first = "layers.0.up.weight"
    split = first if first in dict(model.named_parameters()) else "layers.1.up.weight"
    fix = {} if made["loss"] == "gradient penalty" else {split: {program.last_axis(made): mw.Shard(0)}}
    found = mw.plan(
        model, lambda m, b: loss_of(made, m, b), batch, torch.optim.SGD(model.parameters()), mesh=mesh,
        hardware="cpu-gloo", fix=fix,
    )  # fmt: skip
    return dict(found.plan)


def _chosen(made: Case, model: nn.Module) -> dict[str, Any]:
    """Placements of parameters by name."""
    how, axis = made["layouts"], program.last_axis(made)
    names = dict(model.named_parameters())
    if how == "rows":
        return {n: {axis: mw.Shard(0)} for n, p in names.items() if p.ndim}
    if how != "columns and rows":
        return {}
    first = {n: {axis: mw.Shard(0)} for n, p in names.items() if p.ndim and ("up" in n or "qkv" in n)}
    return first | {n: {axis: mw.Shard(p.ndim - 1)} for n, p in names.items() if "down" in n and p.ndim > 1}


def _matching(model: nn.Module, glob: str) -> list[nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return [p for n, p in named if fnmatch.fnmatchcase(n, glob)]


def turned(made: Case, batch: Batch) -> Batch:
    """A batch as the case has it, or back: rows and positions change places."""
    if made["inputs"] != "sequence first":
        return batch
    return {k: v.transpose(0, 1).contiguous() if v.ndim > 1 else v for k, v in batch.items()}


def loss_of(made: Case, model: nn.Module, batch: Batch) -> Any:
    """What the user's loss function gives for a batch as the case has it."""
    return program.loss_of(made, model, turned(made, batch))


def placed(made: Case, batch: Batch) -> dict[str, dict[str, Any]]:
    """How each tensor of a batch lies."""
    axes, turns = program.shared_axes(made), made["inputs"] == "sequence first"
    dims = {axis: dim ^ turns for axis, dim in (("dp", 0), ("cp", 1)) if axis in axes}
    return {k: {a: mw.Shard(d) for a, d in dims.items() if v.ndim > d} for k, v in batch.items()}


@dataclass
class Rank:
    """The program of a rank.

    Attributes:
        folder: that all ranks share; ``table``: layouts that were found.
    """

    made: Case
    mesh: mw.Mesh
    folder: str
    table: Any

    def run(self) -> Result:
        made = self.made
        with torch.device("cpu") if made["context"] == "device" else contextlib.nullcontext():
            run = {"eager": Eager, "captured": Captured, "by hand": ByHand}[MODES[made["mode"]]["kind"]]
            training = run(self)
            torch.manual_seed(1)
            return training.train()

    def model(self, again: bool = False) -> Net:
        """On one device or the meta device, before it is on the mesh."""
        how = self.made["initial"]
        torch.manual_seed(5 if "loaded" in how or "file" in how or again else 0)
        with torch.device("meta") if "meta" in how else contextlib.nullcontext():
            model = Net(self.made, plain=False)
        torch.manual_seed(0)
        stray = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta != ("meta" in how)]
        assert not stray, f"{stray}: not on the device that the constructor was run for"
        return model

    def load(self, model: nn.Module) -> None:
        """The values of the case, where they are not those of the constructor."""
        how = self.made["initial"]
        if how == "from a file":
            mw.load_weights(model, f"{self.folder}/weights")
        elif "loaded" in how:
            torch.manual_seed(0)
            model.load_state_dict(Net(self.made, plain=True).state_dict())

    def storage(self, model: nn.Module, again: bool = False) -> dict[str, Any]:
        """Options of storage, with the axis in its place: over it what is not split over it already."""
        axis = next(iter(program.shared_axes(self.made)))
        options = {k: axis if v == "data" else v for k, v in STORAGES[self.made["storage"]].items()}
        if "fsdp" in options and (globs := self.layouts(model, again)):
            split = {p for glob, how in globs.items() if axis in how for p in _matching(model, glob)}
            options["fsdp"] = {n: axis for n, p in model.named_parameters() if p not in split}
        return options

    def layouts(self, model: nn.Module, again: bool = False) -> Any:
        """What shard_module and compile_step are given."""
        other = again and self.made["resumed"] == "other layout"
        if self.table is not None and not other:
            return self.table
        chosen = {} if other else _chosen(self.made, model)
        # What is to be stored over the axis is said to be whole: else completion may split it as its neighbours are.
        over = "fsdp" in STORAGES[self.made["storage"]]
        return {n: {} for n, _ in model.named_parameters()} | chosen if over else chosen

    def precision(self) -> Any:
        """The precision of the case, or None."""
        how = PRECISIONS[self.made["precision"]]
        dtypes = {k: getattr(torch, how[k]) for k in ("compute", "reduce") if k in how}
        return mw.Precision(**dtypes) if dtypes else None


def whole(t: Tensor) -> Tensor:
    """The global value."""
    return mw.unshard(t.detach()).clone()


class Training:
    """Steps, and what is done between them."""

    def __init__(self, rank: Rank, again: bool = False) -> None:
        self.rank, self.made, self.mesh = rank, rank.made, rank.mesh
        self.model = rank.model(again)
        self.build(again)
        self.schedules = program.schedulers(self.made, self.optimizers)

    optimizers: list[torch.optim.Optimizer]

    def build(self, again: bool) -> None:
        """The model on the mesh, optimizers, step."""
        raise NotImplementedError

    def step(self, micro: list[Batch], i: int, result: Result) -> None:
        """One update."""
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> Tensor:
        """The loss of a batch in evaluation mode."""
        raise NotImplementedError

    def train(self) -> Result:
        """All steps."""
        made, result, training = self.made, Result(), self
        for i, micro in enumerate(self.fed()):
            if made["loader"] == "one rank skips a batch" and i == 1 and runtime.RT.rank == self.mesh.size - 1:
                continue
            program.freeze(made, training.model, i)
            if made["context"] == "exception" and i == 1:
                training.fail(micro)
            training.step(micro, i, result)
            for o in training.schedules:
                o.step()
            if made["context"] in ("eval in between", "inference in between") and made["loss"] != "gradient penalty":
                with torch.inference_mode(made["context"].startswith("inference")):
                    result[f"eval {i}"] = whole(training.evaluate(micro[0]))
            if made["resumed"] == "moved" and i == 0:
                training.move_and_halve()
            elif made["resumed"] != "no" and i == 0:
                training = training.resumed()
        return training.end(result)

    def fed(self) -> Iterator[list[Batch]]:
        """The micro-batches of each update."""
        steps = program.batches(self.made)
        if not program.by_hand(self.made):
            steps = [[turned(self.made, batch) for batch in micro] for micro in steps]
        if self.made["loader"] == "tensors":
            yield from steps
            return
        every = [batch for micro in steps for batch in micro]
        given, size = every, None
        if self.made["loader"] == "dataset":
            given = [{k: v[i] for k, v in batch.items()} for batch in every for i in range(len(batch["x"]))]
            size = len(every[0]["x"])
        loaded = iter(mw.shard_dataloader(given, self.mesh, placed(self.made, every[0]), batch_size=size))
        for micro in steps:
            yield [next(loaded) for _ in micro]

    def fail(self, micro: list[Batch]) -> None:
        """A step that raises, on all ranks, and is left."""
        self.model.fails = True
        with contextlib.suppress(ArithmeticError):
            self.step(micro, 0, Result())
        self.model.fails = False

    def move_and_halve(self) -> None:
        """Weights on a mesh of one axis, and half of them back in their places."""
        line = mw.Mesh({"line": self.mesh.size})
        own = dict(self.model.named_parameters())
        away = mw.move(self.model, line, {n: {"line": mw.Shard(0)} for n, p in own.items() if p.ndim})
        mw.move({n: away[n] * 0.5 for n in own}, self.mesh, into=own)

    def resumed(self) -> Training:
        """Saved, and another program that goes on from there."""
        store = mw.Checkpoints(f"{self.rank.folder}/saved")
        store.save(1, **self.saved()).wait()
        other = type(self)(self.rank, again=True)
        mw.Checkpoints(f"{self.rank.folder}/saved").load(**other.saved())
        return other

    def saved(self) -> dict[str, Any]:
        """What a checkpoint is given."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizers, "scheduler": self.schedules}
        return {k: v for k, v in parts.items() if v != []}

    def end(self, result: Result) -> Result:
        """With weights and buffers."""
        result |= {f"weight {n}": whole(p) for n, p in self.model.named_parameters()}
        return result | {f"buffer {n}": whole(b) for n, b in self.model.named_buffers()}

    def note_gradients(self, i: int, result: Result) -> None:
        """Those of a program that updates nothing."""
        if not self.optimizers:
            grads = {n: p.grad for n, p in self.model.named_parameters()}
            result |= {f"gradient {i} {n}": whole(g) for n, g in grads.items() if g is not None}


class Eager(Training):
    def build(self, again: bool) -> None:
        rank, storage = self.rank, self.rank.storage(self.model, again)
        states = {k: storage.pop(k) for k in ("shard_states", "offload_states") if k in storage}
        before = UPDATES[self.made["update"]].get("before", False)
        self.optimizers = program.optimizers(self.made, self.model) if before else []
        mw.shard_module(self.model, self.mesh, rank.layouts(self.model, again), precision=rank.precision(), **storage)
        if not again:
            rank.load(self.model)
        self.optimizers = self.optimizers or program.optimizers(self.made, self.model)
        for o in self.optimizers if states or not before else ():
            mw.shard_optimizer(o, **states)

    def _placed(self, batch: Batch) -> Batch:
        if self.made["loader"] != "tensors":
            return batch
        how = placed(self.made, batch)
        return {k: mw.shard_tensor(v, self.mesh, how[k]) for k, v in batch.items()}

    def step(self, micro: list[Batch], i: int, result: Result) -> None:
        for p in self.model.parameters():
            p.grad = None
        for k, batch in enumerate(micro):
            last = k == len(micro) - 1
            with contextlib.nullcontext() if last else mw.no_sync(self.model):
                loss = program.first(loss_of(self.made, self.model, self._placed(batch)))
                (loss / len(micro)).backward()
            result[f"loss {i}.{k}"] = whole(loss)
        self.note_gradients(i, result)
        if (clip := UPDATES[self.made["update"]].get("clip")) is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        for o in self.optimizers:
            o.step()

    def evaluate(self, batch: Batch) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            loss = program.first(loss_of(self.made, self.model, self._placed(batch)))
        self.model.train()
        return loss


class Captured(Training):
    def build(self, again: bool) -> None:
        made, rank, mode = self.made, self.rank, MODES[self.made["mode"]]
        micro = MICRO[made["micro"]]
        self.optimizers = program.optimizers(made, self.model)
        passes = list(mode.get("passes", []))
        if program.pipelined(made):
            passes.append(f"pipeline:micro_batches={micro},schedule={made['schedule']}")
        elif micro > 1:
            passes.append(f"gradient-merge:k_steps={micro}")
            axes = program.shared_axes(made)
            if made["inputs"] == "sequence first" and ("cp" in axes or "dp" not in axes):
                passes[-1] += ",rows_dim=1"  # else the first dim has the rows; over dp alone it is seen
        example = turned(made, program.batches(made)[0][0])
        try:
            self.compiled = self._compile(example, passes, again)
        except mw.errors.PassError as error:
            if "pass rows_dim=" not in str(error):
                raise
            passes[-1] += f",rows_dim={int(made['inputs'] == 'sequence first')}"  # as it asks
            self.compiled = self._compile(example, passes, again)
        if not again:
            rank.load(self.model)

    def _compile(self, example: Batch, passes: list[str], again: bool) -> Any:
        made, rank = self.made, self.rank
        return mw.compile_step(
            self.model,
            lambda m, b: loss_of(made, m, b),
            self.optimizers or None,
            example,
            mesh=self.mesh,
            layouts=rank.layouts(self.model, again),
            batch=placed(made, example),
            clip_grad_norm=UPDATES[made["update"]].get("clip"),
            gradients=not self.optimizers,
            precision=rank.precision(),
            passes=passes,
            stages={"pp": "layers"} if MODES[made["mode"]].get("stages") else None,
            **rank.storage(self.model, again),
        )

    def step(self, micro: list[Batch], i: int, result: Result) -> None:
        for k, batch in enumerate(micro):
            result[f"loss {i}.{k}"] = whole(program.first(self.compiled(batch)))
        self.note_gradients(i, result)

    def fail(self, micro: list[Batch]) -> None:
        with contextlib.suppress(mw.errors.ProgramError):
            self.compiled({"x": micro[0]["x"]})

    def evaluate(self, batch: Batch) -> Tensor:
        return program.first(self.compiled.eval(batch))

    def saved(self) -> dict[str, Any]:
        parts = {"program": self.compiled, "scheduler": self.schedules}
        return {k: v for k, v in parts.items() if v != []}


class ByHand(Training):
    def build(self, again: bool) -> None:
        self.rank.load(self.model)
        self.optimizers = program.optimizers(self.made, self.model)
        self.compiled: Any = None

    def _step(self, micro: list[Batch]) -> Any:
        made, model, params = self.made, self.model, list(self.model.parameters())
        clip, losses = UPDATES[made["update"]].get("clip"), []
        for p in params:
            p.grad = None
        for batch in micro:
            loss = program.first(loss_of(made, model, batch))
            losses.append(loss)
            share = batch.get("share", self.share)
            (loss * share / len(micro)).backward()
        grads = [p for p in params if p.grad is not None]
        if clip is not None and made["update"] == "AdamW, clipped":
            nn.utils.clip_grad_norm_(params, clip)
        for p in grads:
            dist.all_reduce(p.grad)
        if clip is not None and made["update"] != "AdamW, clipped":
            nn.utils.clip_grad_norm_(params, clip)
        for o in self.optimizers:
            o.step()
            o.zero_grad()
        return tuple(losses)

    def step(self, micro: list[Batch], i: int, result: Result) -> None:
        here = runtime.RT.rank
        own = []
        for batch in micro:
            part = device.parts_of(self.made, batch)[here]
            share = len(part["x"]) / len(batch["x"])
            if "second" in short(self.made):  # the number changes from step to step
                part["share"] = torch.tensor(share)
            self.share = share
            own.append(turned(self.made, part))
        if self.compiled is None:
            self.compiled = mw.capture_local(
                self._step, self.mesh, model=self.model, optimizer=self.optimizers, batch=own,
                passes=MODES[self.made["mode"]].get("passes", []),
            )  # fmt: skip
        for k, loss in enumerate(self.compiled(own)):
            result[f"loss {i}.{k}"] = loss.detach().clone()


__all__ = ["run"]
