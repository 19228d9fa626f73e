"""Stages of a pipeline: which of the captured values and parameters belong to which.

Modules are said to be at a stage, by name.  What belongs to none of them takes its place from what it is computed of:
an embedding in front of the first block is at the first stage, a head behind the last one at the last.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
import torch.nn as nn

from ...errors import CaptureError, LayoutError, near
from ...mesh import Mesh
from ...ranks.runtime import users_level
from .balance import balanced, described, works
from .export import Captured
from .source_lines import line_of

Given = Mapping[str, str | Mapping[str, int]]
Homes = Callable[[int], tuple[int, ...]]
AUTO = "auto"
_IDLE = 0.001  # of the work, below which a stage is told to have none


@dataclass(frozen=True)
class Stages:
    """Where a captured step is to be cut.

    Attributes:
        axis: of the mesh.
        homes: the coordinate on it of the ranks that have each stage.
        nodes: name of a node of the captured graph to its stage.
        params: first name of a parameter to its stage.
        modules: of each stage, in words; ``shares``: its part of the work of all.
    """

    axis: int
    homes: tuple[int, ...]
    nodes: dict[str, int]
    params: Mapping[str, int]
    modules: tuple[str, ...]
    shares: tuple[float, ...]


def stages_of(
    model: nn.Module,
    captured: Captured,
    mesh: Mesh,
    given: Given | None,
    homes: Homes | None = None,
) -> Stages | None:
    """What ``stages=`` says of a captured step; None where it says nothing.

    Args:
        given: the mesh axis to the name of a list of modules, to globs of names of modules and their stages, or to
            ``"auto"``: stages that take equally long.
        homes: of how many ranks there are along the axis, the one of each stage; None: one each.

    Raises:
        LayoutError: names or globs that match nothing, that overlap, or that leave a stage without modules; fewer
            parts than stages.
        CaptureError: a value that crosses backwards; names the user's line.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or len(given) != 1:
        raise LayoutError(
            f'stages={given!r}: one mesh axis was expected: stages={{"pp": "model.layers"}}, or {{"pp": "auto"}}'
        )
    ((axis, said),) = given.items()
    index = mesh.axis_index(axis)
    at = tuple(range(mesh.sizes[index])) if homes is None else homes(mesh.sizes[index])
    followed = _Followed(captured, None if said == AUTO else _Modules(model, len(at), said), len(at))
    nodes = followed.nodes(axis)
    modules, shares = followed.told(len(at))
    if min(shares) < _IDLE:
        stage = shares.index(min(shares))
        warnings.warn(
            f"stages: stage {stage} of {axis!r} has {shares[stage]:.1%} of the work ({modules[stage]}), and its ranks "
            f'wait for the others: share modules out otherwise, or say stages={{{axis!r}: "auto"}}',
            stacklevel=users_level(),
        )
    return Stages(index, at, nodes, followed.params, modules, shares)


class _Followed:
    """Stages of what no module is said of: by the values that come from the batch.

    What is made of parameters alone, a penalty say, is where they are; they belong where they, or what is made of
    them alone, are first used.
    """

    def __init__(self, captured: Captured, modules: _Modules | None, stages: int) -> None:
        self.captured, self.modules = captured, modules
        self.calls = [n for n in captured.graph.nodes if n.op == "call_function"]
        self.named = named = {s.node: s.name for s in captured.sources if s.kind == "param"}
        placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
        batch = {s.node for s in captured.sources if s.kind not in ("param", "buffer", "constant")}
        fed = {n for n in placeholders if n.name in batch}
        self.lent: set[fx.Node] = set()  # what parameters alone give
        params = {n for n in placeholders if n.name in named}
        for node in self.calls:
            if not fed.isdisjoint(node.all_input_nodes):
                fed.add(node)
            elif not (params | self.lent).isdisjoint(node.all_input_nodes):
                self.lent.add(node)
        self.cut = balanced(captured, self.lent, stages) if modules is None else {}
        self.at: dict[fx.Node, int] = {}
        for node in self.calls:
            if node not in self.lent:
                self.at[node] = self._stage(node)
        names: dict[str, list[str]] = {}
        for name in named.values():
            names.setdefault(name, [name])
        for other, first in captured.tied.items():
            if first in names:
                names[first].append(other)
        self.params: dict[str, int] = {}
        places: dict[str, list[fx.Node]] = {}
        for node in placeholders:
            if node in params:
                places.setdefault(named[node.name], []).append(node)
        for name, nodes in places.items():  # of one that several modules have, the first
            said = [s for n in names[name] if modules and (s := modules.stage(n)) is not None]
            users = [u for node in nodes for u in node.users if u in self.at]
            if len(names[name]) > 1:  # modules of which nothing is said have it, too
                said += [self.at[u] for u in users if said and self._requested_stage(u) is None]
            at = said or [*(self.at[u] for u in users), *(s for node in nodes for s in self._taken(node))]
            self.params[name] = min(at, default=0)
            self.at.update(dict.fromkeys(nodes, self.params[name]))

    def _stage(self, node: fx.Node) -> int:
        here = self._requested_stage(node)
        return max((self.at.get(n, 0) for n in node.all_input_nodes), default=0) if here is None else here

    def _requested_stage(self, node: fx.Node) -> int | None:
        return self.cut.get(node) if self.modules is None else self.modules.stage(_path(node))

    def told(self, stages: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The modules of each stage in words, and its part of the work."""
        took = works(self.captured)
        sums = [sum(w for n, w in took.items() if self.at[n] == s) for s in range(stages)]
        own = {n: s for n, s in self.at.items() if n in took and n not in self.lent}
        modules = described(own, {n: _path(n) for n in own}, stages)
        return tuple(modules), tuple(s / (sum(sums) or 1.0) for s in sums)

    def _taken(self, node: fx.Node) -> list[int]:
        """Where what is made of a parameter alone is used."""
        found, seen, ahead = list[int](), set[fx.Node](), [node]
        while ahead:
            for user in ahead.pop().users:
                if user not in seen and user.op == "call_function":
                    seen.add(user)
                    here = self.at.get(user, self._requested_stage(user))
                    if here is None:
                        ahead.append(user)
                    else:
                        found.append(here)
        return found

    def nodes(self, axis: str) -> dict[str, int]:
        """The stage of each node, by name; raises as :func:`stages_of`."""
        for node in self.calls:
            before = max((self.at[n] for n in node.all_input_nodes if n.op == "call_function"), default=0)
            here = self._stage(node)
            if before > here:
                late = next(n for n in node.all_input_nodes if self.at.get(n, 0) == before)
                raise CaptureError(
                    f"{line_of(node)}: {_path(node)} is at stage {here} of {axis!r} and takes a value of "
                    f"{self._cause(late)}: values go from earlier stages to later ones; put {_path(node)} at stage "
                    f"{before}, or what it takes at stage {here}"
                )
            self.at[node] = here
        return {n.name: self.at[n] for n in self.calls}

    def _cause(self, node: fx.Node) -> str:
        """What gives a value, its stage, and why it is there where nothing is said of what gives it."""
        stage, at = self.at[node], node
        while at.op == "call_function" and self._requested_stage(at) is None:
            before = next((n for n in at.all_input_nodes if self.at.get(n) == stage), None)
            if before is None:
                break
            at = before
        path, why = _path(node) or line_of(node), ""
        if at is not node:
            why = f", as it is made of {self.named.get(at.name) or _path(at) or line_of(at)}"
        return f"{path}, which is at stage {stage}{why}"


class _Modules:
    """The modules that are said to be at a stage."""

    def __init__(self, model: nn.Module, stages: int, said: Any) -> None:
        self.known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        self.at: dict[str, int] = {}
        if isinstance(said, str):
            self._list(model, stages, said)
        elif isinstance(said, Mapping):
            self._globs(stages, said)
        else:
            raise LayoutError(
                f'stages: {said!r}: the name of a list of modules, globs to stages, or "auto" was expected'
            )
        for name, stage in self.at.items():
            outer = next((n for n in self.at if name.startswith(f"{n}.") and self.at[n] != stage), None)
            if outer is not None:
                raise LayoutError(f"stages: {name} is at stage {stage}, and {outer}, which has it, at {self.at[outer]}")
        if empty := sorted({*range(stages)} - {*self.at.values()}):
            raise LayoutError(f"stages: no module is at stage {empty[0]} of {stages}")

    def _list(self, model: nn.Module, stages: int, said: str) -> None:
        if said not in self.known:
            raise LayoutError(f"stages: the model has no module {said!r}{near(said, self.known)}")
        blocks = [n for n, m in model.get_submodule(said)._modules.items() if m is not None]  # shared ones, too
        if len(blocks) < stages:
            raise LayoutError(
                f"stages: {said} has {len(blocks)} modules for {stages} stages: give a list of at least as many"
            )
        self.at = {f"{said}.{name}": i * stages // len(blocks) for i, name in enumerate(blocks)}

    def _globs(self, stages: int, said: Mapping[Any, Any]) -> None:
        by: dict[str, str] = {}
        for glob, stage in said.items():
            if type(stage) is not int or not 0 <= stage < stages:
                raise LayoutError(f"stages: {glob!r} is given {stage!r}: a stage from 0 to {stages - 1} was expected")
            found = [n for n in self.known if fnmatch.fnmatchcase(n, str(glob))]
            if not found:
                raise LayoutError(f"stages: {glob!r} matches no module{near(str(glob), self.known)}")
            for name in found:
                if self.at.setdefault(name, stage) != stage:
                    raise LayoutError(
                        f"stages: {by[name]!r} puts {name} at stage {self.at[name]}, {glob!r} at {stage}: keep one"
                    )
                by[name] = str(glob)

    def stage(self, path: str) -> int | None:
        """Of a module or parameter by its path; None for one that nothing is said of."""
        while path:
            if path in self.at:
                return self.at[path]
            path = path.rpartition(".")[0]
        return None


def _path(node: fx.Node) -> str:
    """The module that a captured node is part of."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[-1].removeprefix("model").removeprefix(".") if stack else ""


__all__ = ["AUTO", "Given", "Homes", "Stages", "stages_of"]
