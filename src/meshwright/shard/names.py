"""The tensors of a model by name, and globs that choose among names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping

import torch
import torch.nn as nn

from ..errors import ShardError
from ..layout import Placements

Tensor = torch.Tensor
Globs = Mapping[str, Placements]


class Names:
    """Parameters and buffers of a model by name; a tied one has several names and is one object."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[int, list[tuple[nn.Module, str, str]]] = {}  # id of the tensor to where it is registered
        self.tensors: dict[str, Tensor] = {}  # first name to tensor
        self.all: dict[str, str] = {}  # every name to the first one
        first: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, t in (*module._parameters.items(), *module._buffers.items()):
                if t is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if id(t) not in first:
                    first[id(t)] = name
                    self.tensors[name] = t
                self.all[name] = first[id(t)]
                self.owners.setdefault(id(t), []).append((module, key, name))

    def places(self, name: str) -> list[tuple[nn.Module, str, str]]:
        """Modules and attribute names under which a tensor is registered."""
        return self.owners[id(self.tensors[name])]

    def current(self) -> dict[str, Tensor]:
        """First name to the tensor that is registered there now."""
        found = {}
        for name in self.tensors:
            module, key, _ = self.places(name)[0]
            found[name] = getattr(module, key)
        return found


def matching(globs: Iterable[str], names: Iterable[str], what: str) -> dict[str, list[str]]:
    """Glob to the names that it matches.  Raises ShardError for one that matches nothing."""
    names = list(names)
    found = {g: [n for n in names if fnmatch.fnmatchcase(n, g)] for g in globs}
    for g, matched in found.items():
        if not matched:
            close = difflib.get_close_matches(g.replace("*", ""), names, n=3, cutoff=0.4)
            near = f"; close ones: {', '.join(close)}" if close else ""
            some = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
            raise ShardError(f"{g!r} matches no {what}{near}; the names are: {some or '(none)'}")
    return found


__all__ = ["Globs", "Names", "matching"]
