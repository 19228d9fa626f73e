"""The tensors of a model by name, and globs that choose among names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.nn as nn

from ...errors import ShardError
from ...layout import Placements

T = TypeVar("T")
Tensor = torch.Tensor
Globs = Mapping[str, Placements]


def name_of(p: Tensor) -> str:
    """Name of a parameter in its model, where known."""
    name = p.__dict__.get("_param_name")
    return f"{name}" if name else f"a parameter of shape {tuple(p.shape)}"


def names_of(params: Iterable[Tensor]) -> list[str]:
    """Names of parameters in their model."""
    return [name_of(p) for p in params]


class Names:
    """Parameters and buffers of a model by name; a tied one has several names and is one object."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[int, list[tuple[nn.Module, str, str]]] = {}  # id of the tensor to where it is registered
        self.tensors: dict[str, Tensor] = {}  # first name to tensor
        self.all: dict[str, str] = {}  # every name to the first one
        self.modules: dict[str, nn.Module] = {}
        first: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            self.modules[prefix] = module
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

    @property
    def params(self) -> dict[str, str]:
        """Every name of a parameter to the first one."""
        return {n: first for n, first in self.all.items() if isinstance(self.tensors[first], nn.Parameter)}

    def said(self, globs: Mapping[str, T], option: str) -> dict[str, T]:
        """What an option says of parameters, by any of their names: the last glob counts that matches a parameter, or a
        module that it is in.

        Raises ShardError for a glob that matches nothing.
        """
        params, found = self.params, dict[str, T]()
        what = f"parameter or module (in {option})"
        for glob, matched in matching(globs, [*params, *self.modules], what).items():
            heads = outermost([n for n in matched if n in self.modules])
            for name in params:
                if fnmatch.fnmatchcase(name, glob) or any(inside(name, m) for m in heads):
                    found[name] = globs[glob]
        return found

    def units(self) -> dict[str, str]:
        """First name of each parameter to the unit that it belongs to, by the name of the unit's module."""
        first: dict[int, str] = {}
        for name, module in self.modules.items():
            first.setdefault(id(module), name or "model")
        by_id = {id(t): name for name, t in self.tensors.items()}
        found: dict[str, str] = {}
        for module, members in units_of(self.modules[""]):
            for p in (p for m in members for p in m._parameters.values() if p is not None):
                found.setdefault(by_id[id(p)], first[id(module)])
        return found

    def current(self) -> dict[str, Tensor]:
        """First name to the tensor that is registered there now."""
        found = {}
        for name in self.tensors:
            module, key, _ = self.places(name)[0]
            found[name] = getattr(module, key)
        return found


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each unit: the module whose forward it spans, and the modules whose parameters belong to it.

    Entries of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` are units with all that is in them, unless
    they are such containers themselves.  Other modules are units of their own parameters.
    """
    taken: set[int] = set()

    def visit(module: nn.Module, entry: bool) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        if id(module) in taken:
            return
        container = isinstance(module, _CONTAINERS)
        if entry and not container:
            inside = [m for m in module.modules() if id(m) not in taken]
            taken.update(id(m) for m in inside)
            yield module, inside
            return
        taken.add(id(module))
        yield module, [module]
        for child in module.children():
            yield from visit(child, container)

    yield from visit(model, False)


def inside(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of what is in it."""
    return not module or name == module or name.startswith(f"{module}.")


def outermost(modules: list[str]) -> list[str]:
    """Modules that are in no other of them."""
    return [m for m in modules if not any(m != other and inside(m, other) for other in modules)]


def matching(
    globs: Iterable[str], names: Iterable[str], what: str, modules: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Glob to the names that it matches.

    Args:
        modules: names of modules, where ``names`` are those of tensors: what matches one of them alone is told so.

    Raises ShardError for a glob that matches nothing.
    """
    names = list(names)
    found = {g: [n for n in names if fnmatch.fnmatchcase(n, g)] for g in globs}
    if lost := [g for g, matched in found.items() if not matched]:
        g, *others = lost
        if any(m and fnmatch.fnmatchcase(m, g) for m in modules):
            raise ShardError(f"{g!r} is the name of a module, and that of a {what} was expected: say {g + '.*'!r}")
        close = difflib.get_close_matches(g.replace("*", ""), names, n=3, cutoff=0.4)
        near = f"; close ones: {', '.join(close)}" if close else ""
        more = f" (nor do {', '.join(map(repr, others))}: is it the plan of another model?)" if others else ""
        some = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        raise ShardError(f"{g!r} matches no {what}{more}{near}; the names are: {some or '(none)'}")
    return found


__all__ = ["Globs", "Names", "inside", "matching", "outermost", "units_of"]
