"""``meshwright layouts``: how a model of the user's is best split on a mesh, without the mesh."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.errors import MeshwrightError

from .options import BAD_INPUT, complain, terminal, writing_to

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def layouts(
    path: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function that takes the mesh and returns model, loss function (or None) and batch.  Called with "
            "the meta device as default: nothing is allocated.",
        ),
    ],
    mesh: Annotated[str, typer.Option("--mesh", metavar="AXIS=SIZE,...", help="Named axes and their sizes.")],
    data: Annotated[str, typer.Option("--data", metavar="AXIS", help="The axis that splits the batch.")] = "dp",
    tensor: Annotated[str, typer.Option("--tensor", metavar="AXIS", help="The axis that splits parameters.")] = "tp",
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", metavar="NAME", help="Also list where meshwright plan differs on this machine."),
    ] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Write the table as TOML.")] = None,
) -> None:
    """Find layouts for your own model: what each axis splits, and why, with no devices and no processes.

    The file that --save writes is edited by hand, and taken by shard_module, compile_step and meshwright explain.

    [dim]Exit codes: 0 done; 2 bad input.[/]
    """
    try:
        from meshwright.mesh import parse_mesh

        on = parse_mesh(mesh)  # what is wrong with it is said before the imports

        from meshwright.planning import layouts as found

        from .subject import users

        subject = users(path, on)
        table = found(subject.model, on, subject.batch, subject.loss_fn, data=data, tensor=tensor, hardware=hardware)
        if save is not None:
            with writing_to("--save", save):
                table.save(save)
    except MeshwrightError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    terminal().print(table)
