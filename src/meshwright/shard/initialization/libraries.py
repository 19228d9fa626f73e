"""Libraries whose models initialise themselves when they are complete, and skip that on the meta device.

Each has a module in ``integrations``, imported once the library is: it registers a :class:`LibraryInitialisation`, and
lets constructors that are recorded initialise their models in the order of one device.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch.nn as nn

# A module of a library to the module of this package that knows how its models initialise themselves.
_MODULES = {"transformers.modeling_utils": "meshwright.integrations.initial_weights"}


@dataclass(frozen=True)
class LibraryInitialisation:
    """The initialisation of a library's models.

    Attributes:
        applies: whether a module is a model of the library.
        run: initialises those tensors of a model, by identity, and no others.
        loads: whether the library is making a model now whose tensors it fills from files.
    """

    applies: Callable[[nn.Module], bool]
    run: Callable[[nn.Module, Set[int]], None]
    loads: Callable[[], bool]


_REGISTERED: list[LibraryInitialisation] = []


def register(initialisation: LibraryInitialisation) -> None:
    """Use ``initialisation`` for models of a library from now on."""
    _REGISTERED.append(initialisation)


def import_integrations() -> bool:
    """Import what knows the libraries that have been imported; whether one was."""
    before = len(_REGISTERED)
    for library, integration in list(_MODULES.items()):
        module = sys.modules.get(library)
        if module is None or getattr(module.__spec__, "_initializing", False):
            continue
        _MODULES.pop(library, None)
        importlib.import_module(integration)
    return len(_REGISTERED) > before


def is_loading() -> bool:
    """Whether a library is making a model now that it fills from files: what it calls was not replaced in time."""
    return any(i.loads() for i in _REGISTERED)


def initialisation_of(module: nn.Module) -> LibraryInitialisation | None:
    """The initialisation of the library that ``module`` is a model of; None for any other module."""
    import_integrations()
    return next((i for i in _REGISTERED if i.applies(module)), None)


__all__ = ["LibraryInitialisation", "import_integrations", "initialisation_of", "is_loading", "register"]
