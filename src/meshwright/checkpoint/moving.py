"""Weights from one mesh to another, in memory: from training to generation, say, again and again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

import torch
import torch.nn as nn

from .. import collective
from ..dispatch import disabled
from ..errors import ShardError, takes
from ..layout import Layout, Placements, Spec, spec_data, spec_from
from ..local_tensor import bare, span_of, storage_of
from ..mesh import Mesh, mesh_data, mesh_from
from ..ranks import runtime
from ..resharding import executor
from ..resharding.moves import Transfer, plan_moves, run_moves
from ..resharding.planner import plan as plan_conversion
from ..shard.gradients.replicas import facts_of
from ..shard.parameters.names import matching
from ..tensor import DistTensor, wrap
from ..tensor.substitutes import itself
from .contents import model_tensors
from .coordination import close_to
from .restore import memory_of

Tensor = torch.Tensor
Tensors = nn.Module | Mapping[str, Tensor]
_TENSORS = ((nn.Module, Mapping, NoneType), "give an nn.Module, or a dict of names to tensors")


@takes(ShardError, source=_TENSORS, into=_TENSORS, mesh=(Mesh, "give the mesh that the tensors move to"))
def move(
    source: Tensors | None, mesh: Mesh, layouts: Mapping[str, Placements] | None = None, *,
    into: Tensors | None = None, names: Mapping[str, str | None] | None = None, max_bytes: int = 1 << 24,
) -> dict[str, Tensor]:  # fmt: skip
    """Move weights to another mesh of the same processes, or of some of them.

    Each rank receives only elements that it lacks, once, in rounds of bounded size. The plan is kept: moving the same
    tensors again needs one exchange of digests and the data. All processes call it together. Parameters and persistent
    buffers of a module move; plain tensors count as replicated.

    DTensor: none; `redistribute` stays on one mesh.

    Args:
        source: A module, or names to tensors. `None` on a process that has none of them.
        mesh: The mesh to move to.
        layouts: Globs of target names to placements, for new tensors. Without a match: replicated. The last match
            counts; globs that name a tied tensor differently raise.
        into: Fill this module, or these tensors, which have layouts on `mesh`. `None` on a process outside `mesh`.
        names: Source names to target names, with at most one `*` on each side: `{"model.*": "*"}`. `None` as a target
            leaves a tensor out. The last match counts; other names stay.
        max_bytes: Bytes that a rank sends, or receives, in a round at most. It holds two such buffers.

    Returns:
        Target name to tensor: new DistTensors, or those of `into`. Empty on processes outside `mesh`.

    Raises:
        ShardError: On every rank, if names, shapes or dtypes do not fit, or a tensor is Partial or on the meta device.
        DesyncError: On every rank, if ranks bring different tensors, or copies that differ.

    Examples:
        ```python
        train, generate = mw.Mesh({"dp": 2, "tp": 2}), mw.Mesh({"tp": 4})


        def refit():
            learner = mw.shard_module(nn.Linear(8, 8), train, {"weight": {"tp": mw.Shard(0)}}, fsdp="dp")
            actor = mw.shard_module(nn.Linear(8, 8), generate, {"weight": {"tp": mw.Shard(1)}})
            mw.move(learner, generate, into=actor)
            return torch.equal(mw.unshard(actor.weight), mw.unshard(learner.weight))


        assert mw.simulate(refit, train) == [True] * 4
        ```
    """
    if not isinstance(max_bytes, int) or max_bytes < 1:
        raise ShardError(f"move: max_bytes={max_bytes!r}: a number of bytes of at least 1 was expected")
    everyone = Mesh({"ranks": runtime.RT.world}, device=mesh.device)
    with collective.together(everyone, "move", kind=ShardError, doing="mw.move") as facts:
        if layouts is not None and into is not None:
            raise ShardError("move: layouts= are for new tensors; those of into= have layouts: leave one of them out")
        before = _Side.of(source, everyone, names or {})
        after = _filled(into, mesh) if into is not None and runtime.RT.rank in mesh.ranks else None
        facts += _copies(before, everyone)
        texts = facts.exchange("tensors that move", (before and before.text(), after and after.text()))
        sources, filled = (_agreed(side, what) for side, what in zip(zip(*texts, strict=True), _SIDES, strict=True))
        if sources is None:
            raise ShardError("move: no rank has a source: give the module, or its tensors, on ranks that hold them")
        firsts, specs = _read(sources)
        if before is None and any(runtime.RT.rank in spec.mesh.ranks for spec in specs.values()):
            raise ShardError("move: other ranks of its mesh have the source: give it on each of them")
        targets = _read(filled) if filled is not None else _new(firsts, specs, mesh, layouts or {})
        facts.append(collective.Fact("options", (max_bytes, mesh, sorted((layouts or {}).items(), key=str))))
        pairs = _paired(firsts, specs, *targets)
        inside = runtime.RT.rank in mesh.ranks
        if inside and filled is not None and after is None:
            raise ShardError("move: other ranks of the mesh fill tensors here: give into= on each of them")
        held = after.tensors if after is not None else _allocated(targets[1], mesh) if inside else {}
        _check_memory(before, after)
    _run(before, held, specs, targets[1], pairs, everyone, max_bytes)
    result = held if into is None else _listed(into)[0]
    return {name: result[first] for name, first in targets[0].items()} if inside else {}


_SIDES = ("what moves", "what is filled")
Firsts = dict[str, str]  # every name to the first one of the same tensor


@dataclass
class _Side:
    """Tensors before or after they move.

    Attributes:
        tensors: by their first names.
        firsts: every name to the first one.
    """

    tensors: dict[str, DistTensor]
    firsts: Firsts

    @classmethod
    def of(cls, given: Tensors | None, everyone: Mesh, names: Mapping[str, str | None]) -> _Side | None:
        """A source, by the names of the target."""
        if given is None:
            return None
        tensors, firsts = _listed(given)
        mesh = next((t.mesh for t in tensors.values() if isinstance(t, DistTensor)), everyone)
        renamed = _renamed(firsts, names)
        by_first: dict[str, str] = {}
        for name, to in renamed.items():
            by_first.setdefault(firsts[name], to)
        made = {to: _distributed(first, tensors[first], mesh) for first, to in by_first.items()}
        return cls(made, {to: by_first[firsts[name]] for name, to in renamed.items()})

    def text(self) -> str:
        """Names and layouts, as every process writes them."""
        lines = [(name, mesh_data(t.mesh), spec_data(_plain_spec(t.spec))) for name, t in self.tensors.items()]
        return json.dumps([lines, self.firsts])


def _filled(into: Tensors, mesh: Mesh) -> _Side:
    tensors, firsts = _listed(into)
    made = {name: _distributed(name, t, mesh) for name, t in tensors.items()}
    for name, t in made.items():
        memory_of(f"move: {name} of the target", t, ShardError)
    return _Side(made, firsts)


def _listed(given: Tensors) -> tuple[dict[str, Tensor], Firsts]:
    if isinstance(given, nn.Module):
        found = model_tensors(given)
        return found.tensors, found.firsts
    first: dict[int, str] = {}
    firsts = {name: first.setdefault(id(t), name) for name, t in given.items()}
    if wrong := next((n for n, t in given.items() if not isinstance(t, Tensor)), None):
        raise ShardError(f"move: {wrong} is no tensor: leave it out")
    return {name: given[name] for name in dict.fromkeys(firsts.values())}, firsts


def _distributed(name: str, t: Tensor, mesh: Mesh) -> DistTensor:
    if t.is_meta:
        raise ShardError(f"move: {name} is on the meta device: give it memory first, with mw.shard_module")
    if not isinstance(t, DistTensor):
        return wrap(t.detach(), Spec(t.shape, t.dtype, Layout(mesh)))
    if t.mesh != mesh:
        raise ShardError(f"move: {name} lies on {t.mesh!r} instead of {mesh!r}: move the tensors of each mesh alone")
    if t.spec.layout.partial:
        raise ShardError(f"move: {name} is Partial ({t.spec!r}): reduce it first, with mw.reshard")
    itself(t)
    return t


def _plain_spec(spec: Spec) -> Spec:
    return Spec(spec.shape, spec.dtype, spec.layout)


def _renamed(names: Firsts, said: Mapping[str, str | None]) -> Firsts:
    """Source name to target name, without those left out."""
    made: dict[str, str | None] = {name: name for name in names}
    for pattern, to in said.items():
        head, star, tail = pattern.partition("*")
        if "*" in tail or (to is not None and to.count("*") > len(star)):
            raise ShardError(f"move: names={{{pattern!r}: {to!r}}}: at most one * on each side was expected")
        matched = [
            n for n in names
            if n == pattern or (star and len(n) >= len(pattern) - 1 and n.startswith(head) and n.endswith(tail))
        ]  # fmt: skip
        if not matched:
            raise ShardError(f"move: no tensor is called {pattern!r}{close_to(pattern, names)}")
        for n in matched:
            made[n] = None if to is None else to.replace("*", n[len(head) : len(n) - len(tail)] if star else "")
    kept = {name: to for name, to in made.items() if to is not None}
    taken: dict[str, str] = {}
    for name, to in kept.items():
        other = taken.setdefault(to, name)
        if names[other] != names[name]:
            raise ShardError(f"move: {other} and {name} would both be called {to}: leave one out, {{{name!r}: None}}")
    return kept


def _copies(before: _Side | None, everyone: Mesh) -> Iterator[collective.Fact]:
    """Samples of what several ranks hold alike, where all ranks have a source."""
    if before is not None and before.tensors:
        shared = {n: (t.spec.layout, bare(t)) for n, t in before.tensors.items()}
        if set(next(iter(shared.values()))[0].mesh.ranks) == set(everyone.ranks):
            yield from facts_of(shared, whole=False)


def _agreed(texts: tuple[str | None, ...], what: str) -> str | None:
    """What all ranks say that say something."""
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            said.setdefault(text, []).append(rank)
    if len(said) > 1:
        (one, ranks), (other, others) = list(said.items())[:2]
        left, right = ({json.dumps(line) for line in json.loads(text)[0]} for text in (one, other))
        line = json.loads(sorted(left ^ right)[0])[0] if left != right else "further names"
        raise ShardError(f"move: ranks {ranks} and {others} differ in {what}, first in {line}: give the same on all")
    return next(iter(said), None)


def _read(text: str) -> tuple[Firsts, dict[str, Spec]]:
    lines, firsts = json.loads(text)
    meshes: dict[str, Mesh] = {}
    specs = {}
    for name, mesh, spec in lines:
        specs[name] = spec_from(spec, meshes.setdefault(json.dumps(mesh), mesh_from(mesh)))
    return firsts, specs


def _new(
    firsts: Firsts, specs: Mapping[str, Spec], mesh: Mesh, layouts: Mapping[str, Placements]
) -> tuple[Firsts, dict[str, Spec]]:
    """How new tensors lie."""
    matched = matching(layouts, firsts, "tensor that moves")
    last = {n: glob for glob, names in matched.items() for n in names}  # a later glob overrides an earlier one
    place = {glob: i for i, glob in enumerate(matched)}
    tied: dict[str, list[str]] = {}
    for n, first in firsts.items():
        tied.setdefault(first, []).append(n)
    made = {}
    for name, spec in specs.items():
        own = {n: last[n] for n in tied[name] if n in last}
        winner = max(own, key=lambda n: place[own[n]], default=None)
        layout = Layout(mesh, {} if winner is None else layouts[own[winner]], ndim=len(spec.shape))
        made[name] = Spec(spec.shape, spec.dtype, layout)
        if winner is not None and len(own) > 1:
            _check_tied(winner, own, layout, matched, layouts)
        if made[name].layout.partial:
            raise ShardError(f"move: {name} cannot be Partial: give Shard, Replicate or At")
    return firsts, made


def _check_tied(
    winner: str, own: Mapping[str, str], layout: Layout, matched: Mapping[str, Sequence[str]],
    layouts: Mapping[str, Placements],
) -> None:  # fmt: skip
    """Raises ShardError where names of one tensor have different layouts: globs of different names contradict each
    other.

    Args:
        winner: the name that says the layout; ``own``: each name with the last glob that matches it.
    """
    for name, glob in own.items():
        if winner not in matched[glob] and Layout(layout.mesh, layouts[glob], ndim=layout.ndim) != layout:
            raise ShardError(
                f"move: {name} and {winner} are one tensor (tied), and layouts= gives them {layouts[glob]!r} and "
                f"{layouts[own[winner]]!r}. Leave out one of {glob!r} and {own[winner]!r}."
            )


def _paired(
    firsts: Firsts, specs: Mapping[str, Spec], target_firsts: Firsts, targets: Mapping[str, Spec]
) -> list[tuple[str, str]]:
    """First names of each target and of its source."""
    pairs: dict[str, str] = {}
    for name, first in target_firsts.items():
        if name in firsts and pairs.setdefault(first, firsts[name]) != firsts[name]:
            raise ShardError(
                f"move: {name} and {first} are one tensor in the target and two in the source: leave one out, with "
                f"names={{...: None}}"
            )
    missing = [n for n in targets if n not in pairs]
    extra = [n for n in specs if n not in pairs.values()]
    if missing or extra:
        lines = [f"the source lacks {', '.join(missing[:4])}{close_to(missing[0], firsts)}"] if missing else []
        lines += [f"the target lacks {', '.join(extra[:4])}{close_to(extra[0], target_firsts)}"] if extra else []
        raise ShardError(f"move: {'; '.join(lines)}: rename them with names=, or leave them out with None there")
    for first, source in pairs.items():
        have, want = specs[source], targets[first]
        numbers = have.dtype.is_floating_point and want.dtype.is_floating_point
        if have.shape != want.shape or not (have.dtype is want.dtype or numbers):
            raise ShardError(f"move: {source} is {_in_words(have)}, and {first} of the target {_in_words(want)}")
    return list(pairs.items())


def _in_words(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"


def _allocated(specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, DistTensor]:
    here = mesh.coordinate(runtime.RT.rank)
    return {
        name: wrap(torch.empty(spec.local_shape(here), dtype=spec.dtype, device=mesh.device), spec)
        for name, spec in specs.items()
    }


def _check_memory(before: _Side | None, after: _Side | None) -> None:
    """Raises ShardError where memory is filled that moves, unless it is the same tensor, or that is filled twice."""
    if after is None:
        return
    sources, firsts = (before.tensors, before.firsts) if before is not None else ({}, {})
    moving: dict[int, list[str]] = {}
    for name, t in sources.items():
        moving.setdefault(storage_of(bare(t)), []).append(name)
    filled: dict[int, list[str]] = {}
    for name, t in after.tensors.items():
        local = bare(t)
        if not local.nbytes:
            continue
        for other in moving.get(storage_of(local), ()):
            source = sources[other]
            if _overlap(bare(source), local) and not (firsts.get(name) == other and _same(source, t)):
                raise ShardError(
                    f"move: {name} of the target lies in the memory of {other}, which moves: copy one of them"
                )
        for other in filled.setdefault(storage_of(local), []):
            if _overlap(bare(after.tensors[other]), local):
                raise ShardError(f"move: {name} and {other} of the target lie in the same memory: leave one out")
        filled[storage_of(local)].append(name)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the stretches of memory from the first to the last element of each meet."""
    (a, b), (c, d) = ((t.data_ptr(), t.data_ptr() + span_of(t) * t.element_size()) for t in (one, other))
    return max(a, c) < min(b, d)


def _same(one: DistTensor, other: DistTensor) -> bool:
    a, b = bare(one), bare(other)
    return (
        a.stride() == b.stride() and a.data_ptr() == b.data_ptr() and _plain_spec(one.spec) == _plain_spec(other.spec)
    )


def _run(
    before: _Side | None, held: Mapping[str, DistTensor], specs: Mapping[str, Spec], targets: Mapping[str, Spec],
    pairs: list[tuple[str, str]], everyone: Mesh, max_bytes: int,
) -> None:  # fmt: skip
    """Move; dims that are split by blocks are brought to a plain split before, and from one afterwards."""
    rank, transfers, sources, filled = runtime.RT.rank, list[Transfer](), list[Tensor | None](), list[Tensor | None]()
    by_blocks: list[tuple[Tensor, Tensor, Spec, Spec]] = []
    with torch.no_grad(), disabled():
        for first, source in pairs:
            have, want = specs[source], targets[first]
            narrow = have.dtype.itemsize < want.dtype.itemsize
            transfer = Transfer(_unblocked(have), _unblocked(want), have.dtype if narrow else want.dtype)
            value = bare(before.tensors[source]) if before is not None else None
            if value is not None and have.layout.blocks:
                value = executor.apply(plan_conversion(have, transfer.source).steps, value)
            place = bare(held[first]).data if first in held else None  # data: written to equally often on all ranks
            if place is not None and want.layout.blocks:
                shape = transfer.target.local_shape(want.mesh.coordinate(rank))
                by_blocks.append((place, place.new_empty(shape), transfer.target, want))
                place = by_blocks[-1][1]
            transfers.append(transfer)
            sources.append(value)
            filled.append(place)
        moves = plan_moves(tuple(transfers), everyone.ranks, rank, max_bytes)
        run_moves(moves, transfers, sources, filled, everyone, rank)
        for place, value, have, want in by_blocks:
            place.copy_(executor.apply(plan_conversion(have, want).steps, value))
    for t in held.values():
        torch.autograd.graph.increment_version(bare(t))


def _unblocked(spec: Spec) -> Spec:
    return spec.with_(layout=spec.layout.without_blocks()) if spec.layout.blocks else spec


__all__ = ["move"]
