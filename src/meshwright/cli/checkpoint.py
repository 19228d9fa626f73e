"""``meshwright checkpoint``: what is in checkpoints, whether it is as it was written, and their weights for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from meshwright.errors import CheckpointError

from .options import BAD_INPUT, complain, terminal

if TYPE_CHECKING:
    from meshwright.checkpoint.manifest import Manifest, SaveFolder

DAMAGED = 1
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run (--save), or of one checkpoint in it.")]

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True, add_completion=False)


@app.callback()
def checkpoint() -> None:
    """Show what is in checkpoints, verify their checksums, export their weights."""


@app.command()
def show(folder: Folder) -> None:
    """List the checkpoints of a run, and what lies where in the newest one."""
    from meshwright.checkpoint.inspection import manifest_of

    saves, console = _saves(folder), terminal()
    for save in saves:
        state = "complete" if save.complete else save.why_incomplete().partition(" ")[2]
        console.print(Text(f"{save.path.name}  step {save.step}, {state}"), soft_wrap=True)
    newest = next((s for s in saves if s.complete), None)
    if newest is None:
        return
    try:
        manifest = manifest_of(newest.path)
    except CheckpointError as error:
        complain(error)
        raise typer.Exit(DAMAGED) from None
    _contents(console, manifest)


def _contents(console: Console, manifest: Manifest) -> None:
    from meshwright.layout import dtype_name

    mesh = manifest.mesh
    size = sum(line.bytes for line in manifest.files.values())
    console.print(
        Text(f"\nstep {manifest.step} on {mesh!r}: {len(manifest.tensors)} tensors, {size:,} bytes"), soft_wrap=True
    )
    table = Table("tensor", "shape", "dtype", *mesh.axes, box=None, pad_edge=False)
    names: dict[str, list[str]] = {}
    for other, name in manifest.aliases.items():
        names.setdefault(name, []).append(other)
    for name, spec in manifest.tensors.items():
        tied = f" = {', '.join(names[name])}" if name in names else ""
        shape = "×".join(map(str, spec.shape)) or "one"
        dtype = dtype_name(spec.dtype)
        table.add_row(Text(name + tied), shape, dtype, *(Text(repr(p)) for p in spec.layout.placements))
    console.print(table)
    for file, line in manifest.files.items():
        console.print(Text(f"{file}  {line.bytes:,} bytes"), soft_wrap=True)


@app.command()
def verify(folder: Folder) -> None:
    """Read all of the checkpoints and compare the checksums.

    [dim]Exit codes: 0 all is as it was written; 1 something is damaged; 2 bad input.[/]
    """
    from meshwright.checkpoint.inspection import damages

    saves = [s for s in _saves(folder) if s.complete]
    found = 0
    with _progress() as progress:
        for save in saves:
            total = sum(p.lstat().st_size for p in save.path.glob("*.safetensors"))
            task = progress.add_task(save.path.name, total=total)
            for text in damages(save.path, lambda n, task=task: progress.advance(task, n)):  # type: ignore[misc]
                complain(text)
                found += 1
            progress.remove_task(task)
    if found:
        raise typer.Exit(DAMAGED)
    listed = ", ".join(str(s.step) for s in saves)
    terminal().print(Text(f"{len(saves)} complete, all as written" + (f": step {listed}" if saves else "")))


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or a new file named .safetensors.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="The checkpoint of this step; else the newest.")] = None,
    shard_bytes: Annotated[
        int, typer.Option(metavar="N", min=1, help="How large the files of a folder may become.")
    ] = 5 * 10**9,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory, or as one safetensors file.

    transformers' [b]from_pretrained[/] reads the folder, with the configuration where the model had one. A few MiB are
    in memory at a time, and all checksums are compared.

    [dim]Exit codes: 0 done; 1 the checkpoint is damaged, or OUT cannot be written; 2 bad input.[/]
    """
    from meshwright.checkpoint.export import chosen, export, vacant

    try:
        save = chosen(folder, step)
        vacant(out)
    except CheckpointError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    with _progress() as progress:
        task = progress.add_task(out.name)
        try:
            names = export(
                save.path, out, shard_bytes, lambda done, total: progress.update(task, completed=done, total=total)
            )
        except CheckpointError as error:
            complain(error)
            raise typer.Exit(DAMAGED) from None
    terminal().print(Text(f"step {save.step} is {', '.join(names)} in {out if out.is_dir() else out.parent}"))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True
    )


def _saves(folder: Path) -> list[SaveFolder]:
    from meshwright.checkpoint.inspection import saves_at

    try:
        return saves_at(folder)
    except CheckpointError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None


__all__ = ["app"]
