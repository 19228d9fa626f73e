"""The command line of ``meshwright explain``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from meshwright.errors import MeshwrightError
from meshwright.explain import Comparison, Explanation, explain_program
from meshwright.mesh import Mesh, parse_mesh
from meshwright.passes import PassManager
from meshwright.program import build
from meshwright.train.config import DEVICES, MOMENTUM, OPTIMIZERS, OptionError

from . import options
from .subject import Shape, Subject, preset, users

BAD_INPUT = 2


def explain(
    mesh: options.Mesh = "dp=1",
    rank: options.Rank = 0,
    device: options.Device = "cpu",
    built_in: options.Preset = None,
    model: options.Model = None,
    layers: options.Layers = None,
    hidden: options.Hidden = None,
    heads: options.Heads = None,
    seq: options.Seq = None,
    batch: options.Batch = None,
    dtype: options.Dtype = None,
    tie: options.Tie = False,
    dropout: options.Dropout = None,
    optimizer: options.Optimizer = OPTIMIZERS[0],
    clip: options.Clip = None,
    stored_over: options.StoredOver = None,
    sequence_parallel: options.SequenceParallel = False,
    passes: options.Passes = None,
    diff: options.Diff = False,
    as_json: options.Json = False,
    html: options.Html = None,
) -> None:
    """Show what a training step sends and holds on a mesh, and why, with no devices and no processes.

    Every collective of one rank's step with its layouts, bytes, group, line and reason; totals; memory.

    [dim]Exit codes: 0 done; 2 bad input.[/]
    """
    shape = Shape(layers, hidden, heads, seq, batch, dtype, dropout, tie, sequence_parallel)
    try:
        described = parse_mesh(mesh, device=_one_of("device", device, DEVICES))
        if device == "cuda" and not torch.cuda.is_available():
            raise OptionError("--device cuda: PyTorch knows the ops of a GPU only where there is one; leave it out")
        if not described.axes or rank not in described.ranks:
            raise OptionError(f"--rank {rank}: {described!r} has the ranks 0 to {described.size - 1}")
        manager = PassManager(passes or ())
        if diff and not manager.passes:
            raise OptionError("--diff compares the program before and after passes: give some, e.g. --pass NAME")
        subject = _subject(built_in, model, shape, described, {"stored_over": stored_over, "clip_grad_norm": clip})
        report = _report(subject, described, rank, _one_of("optimizer", optimizer, OPTIMIZERS), manager, diff)
        if html is not None:
            _write(html, report.to_html(subject.title))
    except MeshwrightError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        typer.echo(report.to_json())
        return
    console = Console()
    console = console if console.is_terminal else Console(width=110)  # a file or a pipe is not folded at 80 columns
    console.print(Text(subject.title, style="bold"))
    console.print(report)


def _one_of(name: str, given: str, choices: tuple[str, ...]) -> str:
    if given not in choices:
        raise OptionError(f"--{name} {given}: one of {', '.join(choices)} was expected")
    return given


def _subject(built_in: str | None, path: str | None, shape: Shape, mesh: Mesh, more: dict[str, Any]) -> Subject:
    if path is None:
        made = preset(built_in or "gpt", shape, mesh)
    else:
        given = ["preset"] if built_in is not None else [k.replace("_", "-") for k in shape.given()]
        if given:
            raise OptionError(f"--{given[0]} is for the built-in models; --model {path} says it itself")
        made = users(path, mesh)
    return replace(made, plan=replace(made.plan, **{k: v for k, v in more.items() if v is not None}))


def _report(
    subject: Subject, mesh: Mesh, rank: int, kind: str, manager: PassManager, diff: bool
) -> Explanation | Comparison:
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained)
    if kind == "sgd":
        optimizer = torch.optim.SGD(trained, momentum=MOMENTUM)
    before = build(subject.model, subject.loss_fn, optimizer, subject.batch, mesh, subject.plan, rank=rank).program
    made = explain_program(manager(before))
    return Comparison(explain_program(before), made) if diff else made


def _write(path: Any, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--html {path}: {error.strerror}") from error
