"""A program as a file: JSON text that can be read and compared, and the constants as tensors.

The file is a zip of ``program.json``, ``constants.bin`` (their bytes, one after the other) and a digest of both.
Nothing in it is code: ops are named, and are looked up when the program is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...errors import ProgramError
from ...layout import Layout, Spec, dtype_name, layout_data, spec_data
from ...mesh import mesh_data
from .nodes import Value, info_of, target_name
from .program import Program

FORMAT, VERSION = "meshwright program", 5
TEXT, TENSORS, DIGEST = "program.json", "constants.bin", "sha256"
# Attributes of torch that stand for themselves, by the word that marks them.
NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def save_program(program: Program, path: str | Path) -> None:
    """Write a rank's program to a file. Every rank writes its own.

    Args:
        program: `step.program`.
        path: The file.

    Raises:
        ProgramError: If a node has no name in a file, or the step has pipeline stages.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 1})


        def save():
            options = {"mesh": mesh, "batch": {"dp": mw.Shard(0)}}
            step = mw.compile_step(nn.Linear(4, 1), lambda model, x: model(x).sum(), None, torch.ones(2, 4), **options)
            mw.save_program(step.program, f"rank{mw.rank()}.mwp")


        mw.simulate(save, mesh)
        ```
    """
    if program.pipeline is not None:
        raise ProgramError("the parts of a pipeline cannot be saved: save the program of the step without the pass")
    held = {name: _dense(t) for name, t in program.constants.items()}
    text = _pretty(
        {
            "format": FORMAT,
            "version": VERSION,
            "torch": torch_version(),
            "mesh": mesh_data(program.mesh),
            "rank": program.rank,
            "constants": [
                [name, dtype_name(t.dtype), t.device.type, list(t.shape), list(t.stride())] for name, t in held.items()
            ],
            **_data(program),
        }
    ).encode()
    tensors = b"".join(
        t.cpu().as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().tobytes() for t in held.values()
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(TEXT, text)
        file.writestr(TENSORS, tensors, zipfile.ZIP_STORED)
        file.writestr(DIGEST, digest(text, tensors))


def digest(text: bytes, tensors: bytes) -> str:
    """What tells a file that is as it was saved."""
    return hashlib.sha256(hashlib.sha256(text).digest() + tensors).hexdigest()


def _dense(t: torch.Tensor) -> torch.Tensor:
    """A constant without gaps or overlaps in its memory, in the order that it has where it has none."""
    t = t.detach().resolve_conj().resolve_neg()
    return t.clone() if torch.empty_like(t).stride() == t.stride() else t.contiguous()


def torch_version() -> str:
    """Major and minor version of torch: ops may differ between them."""
    return ".".join(torch.__version__.split(".")[:2])


def _data(program: Program) -> dict[str, Any]:
    return {
        "update": program.update,
        "inputs": [_non_default_fields(i) for i in program.inputs],
        "outputs": [_non_default_fields(o) for o in program.outputs],
        "nodes": [_node(n) for n in program.graph.nodes],
        "causes": [_non_default_fields(c) for c in program.causes],
        "origins": [_non_default_fields(o) for o in program.origins],
        "parts": {name: _data(part) for name, part in program.parts.items()},
        "schedules": {name: [[a, len(list(n))] for a, n in groupby(s)] for name, s in program.schedules.items()},
        "passes": [str(record) for record in program.passes],
    }


def _non_default_fields(a: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are by default."""
    return {f.name: encoded(v) for f in fields(a) if (v := getattr(a, f.name)) != f.default}


def _node(node: fx.Node) -> dict[str, Any]:
    try:
        made = {"name": node.name, "op": node.op, "target": _target(node), "args": encoded(node.args)}
        if node.kwargs:
            made["kwargs"] = {k: encoded(v) for k, v in node.kwargs.items()}
        made["info"] = _non_default_fields(info_of(node))
    except TypeError as error:
        raise ProgramError(f"%{node.name} ({target_name(node.target)}) cannot be saved: {error}") from None
    return made


def _target(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.name  # a word; the target of an input is what was asked for: "0_weight_exp_avg"
    name = target_name(node.target)
    if not isinstance(node.target, compat.OpOverload) and name != "operator.getitem":
        raise TypeError("it calls a function that is no operator of torch")
    return name


def encoded(a: Any) -> Any:
    """An argument or a note as JSON: what JSON does not have is a dict with one word that says what it is.

    Raises TypeError for what has no name in a file.
    """
    if a is None or isinstance(a, (bool, int, str)):
        return a
    if isinstance(a, float):
        return a if math.isfinite(a) else {"float": str(a)}
    if isinstance(a, fx.Node):
        return {"node": a.name}
    if isinstance(a, list):
        return [encoded(x) for x in a]
    if isinstance(a, tuple):
        return {"tuple": [encoded(x) for x in a]}
    if isinstance(a, Mapping):
        return {"dict": {str(k): encoded(v) for k, v in a.items()}}
    if isinstance(a, Value):
        strides = [] if a.given is None else [list(a.given)]
        return {"value": [list(a.shape), dtype_name(a.dtype), a.storage, a.nbytes, *strides]}
    if isinstance(a, Spec):
        return {"spec": spec_data(a)}
    if isinstance(a, Layout):
        return {"placements": {"ndim": a.ndim, **layout_data(a)}}
    if isinstance(a, torch.device):
        return {"device": str(a)}
    for word, kind in NAMED.items():
        if isinstance(a, kind):
            return {word: str(a).removeprefix("torch.")}
    raise TypeError(f"{a!r} has no name in a file")


# ---------------------------------------------------------------------------------------------- text


def _pretty(a: Any, depth: int = 0) -> str:
    """JSON with a line per node, input and cause, of parts too."""
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(a, dict) and (depth == 0 or "nodes" in a or any("nodes" in v for v in a.values())):
        parts = [f"{inner}{json.dumps(k)}: {_pretty(v, depth + 1)}" for k, v in a.items()]
        return "{\n" + ",\n".join(parts) + f"\n{outer}}}"
    if isinstance(a, list) and a and isinstance(a[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(x) for x in a) + f"\n{outer}]"
    return json.dumps(a)


__all__ = ["digest", "encoded", "save_program", "torch_version"]
