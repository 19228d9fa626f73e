"""``meshwright plan``: mesh, layouts and storage of a model for a machine, without the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.errors import MeshwrightError

from .options import BAD_INPUT, complain, terminal, writing_to

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def plan(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="A function that takes the mesh (that of --mesh, or one rank) and returns model, loss function (or "
            "None), batch and, if wanted, {'optimizer': ...}.  Called with the meta device as default.",
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", help="A built-in model, as of meshwright explain.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", metavar="N", help="How many ranks there are.")] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="AXIS=SIZE,...", help="The mesh, if it is not to be chosen.")
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="A preset, or a file of meshwright calibrate.")
    ] = "",
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="What a rank may hold: 70GB.  Default: 90 % of it.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="Of a built-in model: sequences of all ranks together.")
    ] = None,
    seq: Annotated[int | None, typer.Option("--seq", metavar="N", help="Of a built-in model: tokens of each.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", help="Of a built-in model: blocks.")] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Write the plan as TOML.")] = None,
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write one page of the plan and of its program, built whole (a capture more).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")] = False,
) -> None:
    """Find mesh, layouts and storage of a model for a machine, with no devices and no processes.

    The file that --save writes is edited by hand, and taken by compile_step, shard_module and meshwright explain.

    [dim]Exit codes: 0 done; 2 bad input.[/]
    """
    try:
        found = _found(path, preset, devices, mesh, hardware, memory, {"batch": batch, "seq": seq, "layers": layers})
        if save is not None:
            with writing_to("--save", save):
                found.plan.save(save)
        if html is not None:
            page = found.explain().to_html(f"Plan for {found.mesh.size} × {found.search.hardware.name}")
            with writing_to("--html", html):
                Path(html).write_text(page, encoding="utf-8")
    except MeshwrightError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        typer.echo(found.to_json())
    else:
        terminal().print(str(found), markup=False, highlight=False, soft_wrap=True)


def _found(
    path: str | None, preset: str | None, devices: int | None, mesh: str | None, hardware: str, memory: str | None,
    sizes: dict[str, int | None],
) -> Any:  # fmt: skip
    from meshwright.machines import PRESETS as MACHINES
    from meshwright.machines import hardware as hardware_of
    from meshwright.mesh import parse_mesh
    from meshwright.train.options import OptionError

    if (path is None) == (preset is None):
        raise OptionError("give --preset NAME, or MODULE:FUNCTION of your own model, one of them")
    if not hardware:
        raise OptionError(f"--hardware: give the machine, one of {', '.join(MACHINES)}, or a file of calibrate")
    machine = hardware_of(hardware)  # what is wrong with it is said before the imports
    on = None if mesh is None else parse_mesh(mesh)
    if (on is None) == (devices is None):
        raise OptionError("give --devices N, or --mesh AXIS=SIZE,..., one of them")

    import torch

    from meshwright.mesh import Mesh
    from meshwright.planner import plan as plan_for

    if preset is not None:
        model, loss_fn, batch, optimizer = _built_in(preset, on.size if on is not None else int(devices or 1), sizes)
    else:
        from .subject import users

        subject = users(str(path), on or Mesh({"dp": 1}))
        model, loss_fn, batch = subject.model, subject.loss_fn, subject.batch
        make = subject.optimizer or torch.optim.AdamW
        optimizer = make(model.parameters())
    return plan_for(model, loss_fn, batch, optimizer, devices=devices, mesh=on, hardware=machine, memory=memory)


def _built_in(preset: str, ranks: int, sizes: dict[str, int | None]) -> tuple[Any, Any, Any, Any]:
    """A built-in model, with one sequence for each rank unless --batch says otherwise."""
    import torch

    from meshwright.errors import near
    from meshwright.train.config import StepConfig
    from meshwright.train.model import GPT, Llama, loss_of
    from meshwright.train.options import OptionError

    from .explain import PRESETS, SHAPES

    if preset not in PRESETS:
        raise OptionError(f"--preset {preset}: unknown{near(preset, PRESETS)}")
    given = {"batch": ranks, **PRESETS[preset], **{k: v for k, v in sizes.items() if v is not None}}
    config = StepConfig(**given)
    model = GPT(config, "meta", None if preset == "gpt" else Llama(**SHAPES.get(preset, {})))
    ids = torch.empty(config.batch, config.seq, dtype=torch.long, device="meta")
    return model, lambda m, b: loss_of(m, *b), (ids, ids), config.make_optimizer(model)
