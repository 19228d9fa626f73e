"""A model made anew with smaller dims, from the configuration that it carries (as models of Transformers do)."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn as nn

from ..errors import ShardError, VerifyError
from ..mesh import Mesh
from ..shard.initialization.values import give_values, origins_of
from ..shard.parameters.names import Names

_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")  # of the stream
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_EACH = ("head_dim", "d_kv")
_INNER = ("inter", "inner", "ffn", "d_ff", "mlp")  # in the names of the widths of MLPs
HEAD = 8  # the width of a head


def smaller(model: nn.Module, mesh: Mesh) -> tuple[nn.Module, str] | None:
    """A model of the same class, on the CPU, with heads of :data:`HEAD` values and the same number of them.

    Widths of MLPs become smaller as the stream does, and are as divisible by the mesh as they were.  Numbers of heads,
    of key heads and of experts, vocabularies and layers stay.

    Returns:
        The model, with values of its own, and what was changed; None where it has no such configuration.
    """
    config = getattr(model, "config", None)
    first = next((k for k in _WIDTH if type(getattr(config, k, None)) is int), None)
    heads = next((getattr(config, k) for k in _HEADS if type(getattr(config, k, None)) is int), 0)
    if config is None or first is None or not heads:
        return None
    old = getattr(config, first)
    each = next((getattr(config, k) for k in _EACH if type(getattr(config, k, None)) is int), old // heads)
    if each <= HEAD:
        return None
    new, own = old * HEAD // each, copy.deepcopy(config)
    new -= new % heads
    said = [_set(own, key, HEAD) for key in _EACH if type(getattr(own, key, None)) is int]
    for key, value in list(vars(config).items()):
        if type(value) is not int:
            continue
        if value == old and any(w in key for w in _WIDTH):
            said.append(_set(own, key, new))
        elif value > HEAD and any(w in key for w in _INNER):
            less = max(1, value * new // old // mesh.size) * mesh.size + value % mesh.size
            said.append(_set(own, key, less))
    with torch.random.fork_rng():
        made: Any = type(model)(own)
    made.to(dtype=next(model.parameters()).dtype).train(model.training)
    _like(made, model)
    return made, f"dims, with new values: {', '.join(dict.fromkeys(said))}"


def _set(config: Any, key: str, value: int) -> str:
    text = f"{key} {getattr(config, key)} to {value}"
    setattr(config, key, value)
    return text


def _like(made: nn.Module, model: nn.Module) -> None:
    """Freeze, and switch to training, what is so in the model.  Raises KeyError for one that has other modules."""
    own, modules = dict(made.named_parameters()), dict(made.named_modules())
    for name, p in model.named_parameters():
        own[name].requires_grad_(p.requires_grad)
    for name, module in model.named_modules():
        modules[name].training = module.training


def with_values(model: nn.Module) -> nn.Module:
    """A model whose tensors have values: of one on the meta device those with which it begins.

    Raises:
        VerifyError: nothing says which; names the tensor.
    """
    empty = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if not empty:
        return model
    made: Any = None
    config, kind = getattr(model, "config", None), type(model).__name__
    if config is not None:
        made = type(model)(copy.deepcopy(config))
        made.to(dtype=next(model.parameters()).dtype)
        _like(made, model)
        return cast(nn.Module, made)
    names = Names(model)
    made = copy.deepcopy(model)
    try:
        give_values(made, Names(made), origins_of(names.tensors), "cpu", None)
    except ShardError as error:
        raise VerifyError(f"verify trains {kind}, which is on the meta device: {error}") from error
    return cast(nn.Module, made)


__all__ = ["smaller", "with_values"]
