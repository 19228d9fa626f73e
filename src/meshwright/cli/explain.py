"""``meshwright explain``: what a step sends and holds on a mesh, without the mesh."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from meshwright.errors import MeshwrightError
from meshwright.train.choices import MESH, MODEL, OUTPUT, PROGRAM, ways_of
from meshwright.train.config import StepConfig
from meshwright.train.options import OptionError, one_of, option

from .options import BAD_INPUT, complain, options_of, said, terminal, values_of, writing_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.explanation import Comparison, Explanation
    from meshwright.passes import Pass
    from meshwright.program import Program
    from meshwright.train.model import Llama

MORE = 1  # exit code: more is sent than in --compare
LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "dtype": "bfloat16"}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama-7b": LLAMA,
    "llama-405b": LLAMA | {"layers": 126, "hidden": 16384, "heads": 128, "seq": 8192},
    # Of the sizes of Mixtral 8x7B and DeepSeek-V3 but for attention, which is Llama's, and layers, which are all alike.
    "mixtral": LLAMA | {"experts": 8, "expert_width": 14336},
    "deepseek": LLAMA | {"layers": 61, "hidden": 7168, "heads": 56, "experts": 256, "experts_per_token": 8,
                         "expert_width": 2048, "shared_experts": 1},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"llama-405b": {"vocabulary": 128256, "kv_heads": 8, "inner": 53248 / 16384}}
GPT_ONLY = ("dropout", "tie")
EXPERTS = ("experts", "experts_per_token", "expert_width", "shared_experts")
OF_MODEL = ("layers", "hidden", "heads", "seq", "batch", "dtype", *EXPERTS, *GPT_ONLY, "sequence_parallel")


@dataclass(frozen=True)
class ExplainConfig(StepConfig):
    """What ``meshwright explain`` was asked for."""

    rank: int = option(0, "--rank", MESH, "Rank to explain.")
    preset: str = option(
        "gpt", "--preset", MODEL,
        "A built-in model: [bold]gpt[/] (of meshwright train), [bold]llama-7b[/], [bold]llama-405b[/], and with "
        "experts [bold]mixtral[/], "
        "[bold]deepseek[/], which are of these sizes but for their attention, which is Llama's.",
        one_of(tuple(PRESETS)),
    )  # fmt: skip
    model: str | None = option(
        None, "--model", MODEL,
        "Your own: a function that takes the mesh and returns model, loss function, batch and a dict of "
        "compile_step arguments (layouts, batch, ...).  Called with the meta device as default: nothing is allocated.",
        metavar="MODULE:FUNCTION",
    )  # fmt: skip
    layouts: str | None = option(
        None, "--layouts", MODEL, "With --model: a file of [bold]meshwright layouts --save[/], in place of its own.",
        metavar="FILE",
    )  # fmt: skip
    hardware: str | None = option(
        None, "--hardware", PROGRAM,
        "Also predict when a rank computes, sends and waits on this machine: a preset or a file of meshwright "
        "calibrate.",
        metavar="NAME",
    )  # fmt: skip
    diff: bool = option(False, "--diff", PROGRAM, "Compare the program before and after the passes.")
    as_json: bool = option(False, "--json", OUTPUT, "One JSON object on stdout instead of text.")
    compare: str | None = option(
        None, "--compare", OUTPUT,
        "What an earlier run wrote with --json: what is sent more than there is listed, and the exit code is 1.",
        metavar="FILE",
    )  # fmt: skip
    html: str | None = option(None, "--html", OUTPUT, "Also write one self-contained page.", metavar="FILE")

    def __post_init__(self) -> None:
        """Raises OptionError or MeshError."""
        super().__post_init__()
        mesh = self.make_mesh()
        if not mesh.axes or self.rank not in mesh.ranks:
            raise OptionError(f"--rank {self.rank}: {mesh!r} has the ranks 0 to {mesh.size - 1}")
        if self.layouts is not None and self.model is None:
            raise OptionError("--layouts is for your own model (--model); the built-in ones have a plan")
        if self.diff and not self.passes:
            raise OptionError("--diff compares the program before and after passes: give some, e.g. --pass NAME")


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
@options_of(ExplainConfig)
def explain(context: typer.Context, **given: Any) -> None:
    """Show what a training step sends and holds on a mesh, and why, with no devices and no processes.

    Every collective of one rank's step with its layouts, bytes, group, line and reason; totals; memory.

    [dim]Exit codes: 0 done; 1 more than in --compare; 2 bad input.[/]
    """
    try:
        config = _config(given, {name for name in given if said(context, name)})
        title, report = _report(config)
        more = [] if config.compare is None else _grown(config.compare, report)
        if config.html is not None:
            _write(config.html, report.to_html(title))
    except MeshwrightError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    if config.as_json:
        typer.echo(report.to_json())
    else:
        console = terminal()
        console.print(Text(title, style="bold"))
        console.print(report)
    if more:
        complain(f"this step sends more than the one of {config.compare}:\n" + "\n".join(more))
        raise typer.Exit(MORE)


def _config(given: dict[str, Any], said: set[str]) -> ExplainConfig:
    """The options as a value; sizes of which nothing was said are those of the preset."""
    values = values_of(ExplainConfig, given)
    if values["model"] is not None:
        others = [n for n in ("preset", *OF_MODEL) if n in said]
        if others:
            flag = others[0].replace("_", "-")
            raise OptionError(f"--{flag} is for the built-in models; --model {values['model']} says it itself")
        return ExplainConfig(**values)
    preset = PRESETS.get(values["preset"], {})
    for name in GPT_ONLY:
        if preset and name in said:
            raise OptionError(f"--{name}: only the GPT has that")
    if preset:  # one sequence for each rank and micro-batch
        preset = preset | {"batch": ways_of(values["mesh"]) * (values["micro_batches"] or 1)}
    return ExplainConfig(**values | {n: v for n, v in preset.items() if n not in said})


def _report(config: ExplainConfig) -> tuple[str, Explanation | Comparison]:
    """A title, and the explanation of the step."""
    manager, mesh = config.pass_manager(), config.make_mesh()  # what is wrong with them is said before the imports

    import torch

    from meshwright.compat import pytree
    from meshwright.explanation import Comparison, explain_program
    from meshwright.machines import hardware
    from meshwright.program import build
    from meshwright.program.capture.ledger import ledger_of
    from meshwright.program.run.pipeline import cut_batch

    from .subject import subject_of

    machine = None if config.hardware is None else hardware(config.hardware)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: PyTorch knows the ops of a GPU only where there is one; leave it out")
    subject = subject_of(config, config.model, config.layouts, _shape(config))
    make = subject.optimizer
    optimizer = config.make_optimizer(subject.model) if make is None else make(subject.model.parameters())
    batch = subject.batch
    if manager.splits > 1:  # a program is that of a micro-batch
        leaves, tree = pytree.tree_flatten(batch)
        batch = pytree.tree_unflatten(cut_batch(leaves, manager.splits)[0], tree)
    before = build(
        subject.model,
        subject.loss_fn,
        optimizer,
        batch,
        mesh,
        subject.plan,
        rank=config.rank,
        homes=manager.homes,
        weighing=manager.weighing,
    )

    def explained(program: Program, passes: Sequence[Pass] = ()) -> Explanation:
        asked = ledger_of(subject.model, optimizer, subject.plan, before, program, passes)
        return explain_program(program, asked, machine)

    made = explained(manager(before.program), manager.passes)
    return subject.title, Comparison(explained(before.program), made) if config.diff else made


def _shape(config: ExplainConfig) -> Llama | None:
    from meshwright.train.model import Llama

    return None if config.preset == "gpt" else Llama(**SHAPES.get(config.preset, {}))


def _grown(path: str, report: Explanation | Comparison) -> list[str]:
    """What is sent more than in the explanation that a file has.  Raises OptionError for another file."""
    from meshwright.explanation import Comparison, grown

    try:
        before = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--compare {path}: {error}; write it with meshwright explain --json > {path}") from None
    return grown(before, report.after if isinstance(report, Comparison) else report)


def _write(path: str, page: str) -> None:
    with writing_to("--html", path):
        Path(path).write_text(page, encoding="utf-8")
