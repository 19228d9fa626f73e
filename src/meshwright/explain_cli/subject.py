"""What is explained: a built-in model or the user's own, on the meta device."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

import meshwright as mw
from meshwright.program import Plan
from meshwright.train import model as gpt
from meshwright.train.config import DTYPES, OptionError, TrainConfig
from meshwright.train.plan import plan_for

from . import llama


@dataclass(frozen=True)
class Subject:
    """A training step to be laid on a mesh.

    Attributes:
        title: of the report.
        model, loss_fn, batch, plan: as for ``meshwright.program.capture.build``.
    """

    title: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any] | None
    batch: Any
    plan: Plan


@dataclass(frozen=True)
class Shape:
    """Sizes of a built-in model; None: those of the preset."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    seq: int | None = None
    batch: int | None = None
    dtype: str | None = None
    dropout: float | None = None
    tie: bool = False
    sequence_parallel: bool = False

    def given(self) -> dict[str, Any]:
        """What is not left to the preset."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v is not False}


# ---------------------------------------------------------------------------------------------- built-in models


def _gpt(shape: Shape, mesh: mw.Mesh) -> Subject:
    wanted: dict[str, Any] = {"batch": max(TrainConfig.batch, _ways(mesh)), **shape.given()}
    config = TrainConfig(mesh=tuple(zip(mesh.axes, mesh.sizes, strict=True)), device=mesh.device, **wanted)
    plan = plan_for(mesh, sequence_parallel=config.sequence_parallel, tie=config.tie)
    ids = torch.empty(config.batch, config.seq, dtype=torch.long, device="meta")
    return Subject(
        f"GPT, {config.layers} × {config.hidden}", gpt.GPT(config, "meta"), lambda m, b: gpt.loss_of(m, *b), (ids, ids),
        Plan(layouts=plan.parameters, batch=plan.batch, inputs=plan.inputs, outputs=plan.outputs),
    )  # fmt: skip


_LLAMA_7B = {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "dtype": "bfloat16"}
_INNER, _VOCABULARY = 11008 / 4096, 32000


def _llama(shape: Shape, mesh: mw.Mesh) -> Subject:
    for name in ("dropout", "tie"):
        if name in shape.given():
            raise OptionError(f"--{name}: only the GPT has that")
    sizes: dict[str, Any] = {**_LLAMA_7B, "batch": _ways(mesh), **shape.given()}
    layers, hidden, heads = sizes["layers"], sizes["hidden"], sizes["heads"]
    TrainConfig(layers=layers, hidden=hidden, heads=heads, seq=sizes["seq"], batch=sizes["batch"], dtype=sizes["dtype"])
    with torch.device("meta"), _default_dtype(DTYPES[sizes["dtype"]]):
        model = llama.Llama(layers, hidden, heads, round(hidden * _INNER), _VOCABULARY, sizes["seq"])
        ids = torch.empty(sizes["batch"], sizes["seq"], dtype=torch.long)
    plan = llama.plan_for(mesh, sequence_parallel=shape.sequence_parallel)
    count = sum(p.numel() for p in model.parameters())
    return Subject(f"Llama of {count / 1e9:.1f}B parameters", model, llama.loss_of, (ids, ids), plan)


PRESETS: dict[str, Callable[[Shape, mw.Mesh], Subject]] = {"gpt": _gpt, "llama-7b": _llama}


def preset(name: str, shape: Shape, mesh: mw.Mesh) -> Subject:
    """A built-in model.

    Raises:
        OptionError, MeshError: no such model, sizes that do not fit, an axis that its plan does not know.
    """
    if name not in PRESETS:
        raise OptionError(f"--preset {name}: one of {', '.join(PRESETS)} was expected")
    if shape.sequence_parallel and "tp" not in mesh.axes:
        raise OptionError(f"--sequence-parallel splits the residual stream over tp, and {mesh!r} has no such axis")
    return PRESETS[name](shape, mesh)


def _ways(mesh: mw.Mesh) -> int:
    """Into how many parts the batch is split."""
    return mesh.axis_size("dp") if "dp" in mesh.axes else 1


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------------------------------------- the user's own


def users(path: str, mesh: mw.Mesh) -> Subject:
    """What the user's function ``module:function`` returns, called with the mesh.

    Raises:
        OptionError: no such function, or it returns something else.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise OptionError(f"--model {path}: module:function was expected, as in mypackage.train:step")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"--model {path}: {error}") from error
    with torch.device("meta"):
        made = function(mesh)
    if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], nn.Module):
        raise OptionError(
            f"--model {path}: it returned {type(made).__name__}; a tuple (model, loss_fn, batch) or (model, loss_fn, "
            "batch, {'layouts': {...}, 'batch': {...}}) was expected"
        )
    model, loss_fn, batch, *said = made
    return Subject(f"{type(model).__name__} of {path}", model, loss_fn, batch, _plan(path, said[0] if said else {}))


def _plan(path: str, said: Any) -> Plan:
    if isinstance(said, Plan):
        return said
    known = [f.name for f in dataclasses.fields(Plan)]
    if not isinstance(said, Mapping) or any(k not in known for k in said):
        raise OptionError(
            f"--model {path}: {said!r} was returned last; a mapping with some of {', '.join(known)} was expected"
        )
    return Plan(**said)
