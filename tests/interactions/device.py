"""A case on one device: the plain PyTorch program, which knows of no mesh."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn as nn

import meshwright as mw

from . import program
from .factors import MICRO, UPDATES, Case
from .losses import Batch
from .program import Net, Result


def run(made: Case) -> list[Result]:
    """What each rank is to have: losses, gradients (where nothing updates), weights and buffers at the end."""
    with program.default_dtype(made):
        if program.by_hand(made):
            return _by_hand(made)
        return [_global(made)]


def _model(made: Case) -> Net:
    torch.manual_seed(0)
    return Net(made, plain=True)


def _end(made: Case, model: nn.Module, result: Result) -> Result:
    result |= {f"weight {n}": p.detach() for n, p in model.named_parameters()}
    return result | {f"buffer {n}": b.detach() for n, b in model.named_buffers()}


def _clipped(made: Case, model: nn.Module) -> None:
    if (clip := UPDATES[made["update"]].get("clip")) is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)


def _global(made: Case) -> Result:
    model, result = _model(made), Result()
    parts = program.optimizers(made, model)
    schedules = program.schedulers(made, parts)
    torch.manual_seed(1)
    with mw.reproducible_random() if made["random"] == "dropout" else contextlib.nullcontext():
        for i, micro in enumerate(program.batches(made)):
            program.freeze(made, model, i)
            for p in model.parameters():
                p.grad = None
            _backward(made, model, micro, i, result)
            if not parts:
                result |= {f"gradient {i} {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
            _clipped(made, model)
            for o in (*parts, *schedules):
                o.step()
            _between(made, model, micro[0], i, result)
            if made["resumed"] == "moved" and i == 0:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.5)
    return _end(made, model, result)


def _backward(made: Case, model: nn.Module, micro: list[Batch], i: int, result: Result) -> None:
    """The gradients of one update: of all rows at once where the pass merges, else as a loop accumulates them."""
    if program.merges(made):
        with torch.no_grad() if made["loss"] != "gradient penalty" else contextlib.nullcontext():
            for k, batch in enumerate(micro):
                result[f"loss {i}.{k}"] = program.first(program.loss_of(made, model, batch)).detach()
        whole = program.first(program.loss_of(made, model, program.joined(micro)))
        (whole / len(micro) if made["loss"] == "sum" else whole).backward()
        return
    for k, batch in enumerate(micro):
        loss = program.first(program.loss_of(made, model, batch))
        result[f"loss {i}.{k}"] = loss.detach()
        (loss / len(micro)).backward()


def _between(made: Case, model: nn.Module, batch: Batch, i: int, result: Result) -> None:
    if made["context"] in ("eval in between", "inference in between") and made["loss"] != "gradient penalty":
        model.eval()
        with torch.no_grad():
            result[f"eval {i}"] = program.first(program.loss_of(made, model, batch))
        model.train()


def parts_of(made: Case, batch: Batch) -> list[Batch]:
    """The batch of each rank of a step by hand."""
    n = program.sharing(made)
    size = -(-len(batch["x"]) // n)
    return [{k: v[r * size : (r + 1) * size] if v.ndim else v for k, v in batch.items()} for r in range(n)]


def _by_hand(made: Case) -> list[Result]:
    """Each rank's losses; gradients are summed over ranks, each times its share of the rows."""
    results, models = [Result() for _ in range(program.sharing(made))], [_model(made)]
    models += [copy.deepcopy(models[0]) for _ in results[1:]]  # buffers are each rank's own
    for model in models[1:]:
        model.hook_parameters()
    params = list(models[0].parameters())
    optimizers = program.optimizers(made, models[0])
    schedules = program.schedulers(made, optimizers)
    for i, micro in enumerate(program.batches(made)):
        sums = [torch.zeros_like(p) for p in params]
        for rank, (model, result) in enumerate(zip(models, results, strict=True)):
            program.freeze(made, model, i)
            for p, value in zip(model.parameters(), params, strict=True):
                p.data, p.grad = value.data, None
            for k, batch in enumerate(micro):
                own = parts_of(made, batch)[rank]
                loss = program.first(program.loss_of(made, model, own))
                result[f"loss {i}.{k}"] = loss.detach()
                (loss * (len(own["x"]) / len(batch["x"]) / MICRO[made["micro"]])).backward()
            if made["update"] == "AdamW, clipped":  # each rank its own
                _clipped(made, model)
            sums = [s if p.grad is None else s + p.grad for s, p in zip(sums, model.parameters(), strict=True)]
        for p, s in zip(params, sums, strict=True):
            p.grad = s if p.requires_grad else None
        if made["update"] != "AdamW, clipped":
            _clipped(made, models[0])
        for o in (*optimizers, *schedules):
            o.step()
    return [_end(made, model, result) for model, result in zip(models, results, strict=True)]
