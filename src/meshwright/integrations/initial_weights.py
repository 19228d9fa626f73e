"""Initial weights of Transformers models from the meta device: imported once there is a mesh and the library is.

On the meta device the library skips ``init_weights()``.  A constructor that is recorded runs it all the same, where
one device does, so that its random numbers come in the same order.  ``from_pretrained`` builds its models on the meta
device, too, and fills them itself: it is left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from .. import torch_changes
from ..errors import ShardError, extra
from ..shard.initialization.libraries import LibraryInitialisation, register
from ..shard.initialization.recording import recording_now, unrecorded

_models = extra("transformers.modeling_utils", "hf", "meshwright.integrations.initial_weights")
_FLAG = "_is_hf_initialized"  # of modules and tensors that the library initialises no more
_MODEL = "transformers.modeling_utils.PreTrainedModel"


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, _models.PreTrainedModel)


def _initialise(model: Any, lacking: Set[int]) -> None:
    """Run the library's initialisation for the tensors with the ids ``lacking``.

    Raises:
        ShardError: If weights that the library ties are not tied.
    """
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if model.get_parameter_or_buffer(name) is not model.get_parameter_or_buffer(source):
            raise ShardError(
                f"shard_module: {name} is not tied to {source}, as the configuration of {type(model).__name__} says. "
                "Call model.tie_weights() before shard_module."
            )
    with _flags(model, lacking):
        model.initialize_weights()


@contextmanager
def _flags(model: nn.Module, lacking: Set[int]) -> Iterator[None]:
    """Inside, all tensors but ``lacking`` are marked as initialised, and all modules without one of these.

    A module may initialise tensors of its children, too.
    """
    marked = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in lacking and not hasattr(t, _FLAG)]
    for module in model.modules():
        held = (*module.parameters(), *module.buffers())
        module.__dict__[_FLAG] = not any(id(t) in lacking for t in held)
    for t in marked:
        t.__dict__[_FLAG] = True
    try:
        yield
    finally:
        for t in marked:
            t.__dict__.pop(_FLAG, None)


@torch_changes.replace(
    f"{_MODEL}.init_weights",
    why="a model whose constructor is recorded on the meta device is initialised as on one device",
)
def _recorded_init(original: Callable[..., None], name: str) -> Any:
    @functools.wraps(original)
    def init_weights(self: Any) -> None:
        recording = recording_now()
        if recording is not None:
            try:
                self.initialize_weights()
            except Exception as error:  # such as one that reads values, which meta tensors do not have
                recording.failed.append(f"{type(self).__name__}.initialize_weights: {type(error).__name__}: {error}")
        original(self)

    return init_weights


@torch_changes.replace(
    f"{_MODEL}.get_init_context",
    why="from_pretrained initialises what is not in its files after it has read them: nothing is recorded there",
)
def _loaded_init(original: Callable[..., Any], name: str) -> Any:
    def get_init_context(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [unrecorded(), *original.__func__(cls, *args, **kwargs)]  # type: ignore[attr-defined]

    return classmethod(functools.wraps(original)(get_init_context))


def _loads() -> bool:
    """Whether ``from_pretrained`` is among the callers."""
    code, frame = _models.PreTrainedModel.from_pretrained.__func__.__code__, sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


register(LibraryInitialisation(_is_model, _initialise, _loads))
