"""What is explained: a built-in model or the user's own, on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from meshwright import Mesh  # and all that guards torch, before users' modules are imported
from meshwright.program import Plan
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of
from meshwright.train.options import OptionError
from meshwright.train.plan import plan_for
from meshwright.train.users import call_users_function, users_function


@dataclass(frozen=True)
class Subject:
    """A training step to be laid on a mesh.

    Attributes:
        title: of the report.
        model, loss_fn, batch, plan: as for ``meshwright.program.capture.build``.
        optimizer: what makes one of parameters, where the user's function says it.
    """

    title: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any] | None
    batch: Any
    plan: Plan
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None


def subject_of(config: StepConfig, path: str | None, layouts: str | None, llama: Llama | None) -> Subject:
    """A built-in model, or what the function at ``path`` returns.

    Raises:
        OptionError, MeshError: no such function, or an axis that the plan of a built-in model does not know.
    """
    mesh = config.make_mesh()
    made = _built_in(config, mesh, llama) if path is None else users(path, mesh)
    said: dict[str, Any] = {
        "fsdp": config.fsdp, "shard_states": config.shard_states, "clip_grad_norm": config.clip,
        "precision": config.policy, "layouts": layouts,
    }  # fmt: skip
    if path is None:
        said["stages"] = config.stages
    return replace(made, plan=replace(made.plan, **{k: v for k, v in said.items() if v is not None}))


def _built_in(config: StepConfig, mesh: Mesh, llama: Llama | None) -> Subject:
    plan = plan_for(
        mesh, sequence_parallel=config.sequence_parallel, tie=config.tie, few=llama is not None,
        experts=config.experts is not None, shared=bool(config.shared_experts),
    )  # fmt: skip
    model = GPT(config, "meta", llama)
    count = sum(p.numel() for p in model.parameters())
    kind = "Llama" if config.experts is None else f"Llama with {config.experts} experts,"
    title = f"{kind} of {count / 1e9:.1f}B parameters" if llama else f"GPT, {config.layers} × {config.hidden}"
    ids = torch.empty(config.batch, config.seq, dtype=torch.long, device="meta")
    return Subject(title, model, lambda m, b: loss_of(m, *b), (ids, ids), plan)


def users(path: str, mesh: Mesh, device: str = "meta") -> Subject:
    """What the user's function ``module:function`` returns, called with the mesh and this default device.

    Raises:
        OptionError: no such function, or it returns something else.
    """
    function = users_function(path)
    with torch.device(device):
        made = call_users_function(path, function, mesh, "batch")
    model, loss_fn, batch, *said = made
    plan, optimizer = _plan(path, said[0] if said else {})
    return Subject(f"{type(model).__name__} of {path}", model, loss_fn, batch, plan, optimizer)


def _plan(path: str, said: Any) -> tuple[Plan, Any]:
    if isinstance(said, Plan):
        return said, None
    known = [*(f.name for f in dataclasses.fields(Plan)), "optimizer"]
    if not isinstance(said, Mapping) or any(k not in known for k in said):
        raise OptionError(f"{path}: {said!r} was returned last; a mapping with some of {', '.join(known)} was expected")
    return Plan(**{k: v for k, v in said.items() if k != "optimizer"}), said.get("optimizer")
