"""Defects that the arrays must find: mends of silent errors, taken out one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.utils import _device

import meshwright.kernels as kernels
from meshwright import torch_changes
from meshwright.errors import PassError
from meshwright.passes import agreement
from meshwright.program.capture import build, micro_batches
from meshwright.program.capture.loss_sums import MicroBatchWeight
from meshwright.program.capture.loss_terms import LossTerms, Mixed
from meshwright.program.capture.micro_batches import find_weight
from meshwright.program.capture.partition import _Partition
from meshwright.program.ir.loss_weight import LossWeight
from meshwright.ranks import runtime
from meshwright.shard.gradients.batches import SameBatches
from meshwright.shard.initialization.replay import Replay

from .factors import Case
from .judge import BAD, Verdict, judge
from .limits import known

Defect = Callable[[], contextlib.AbstractContextManager[Any]]


class _NoExchange:
    """In the place of what says how passes exchange what they see."""

    def get(self) -> None:
        return None

    def set(self, by: Any) -> None:
        return None

    def reset(self, token: None) -> None:
        return None


def _equal_counts(*args: Any) -> Any:
    found = find_weight(*args)
    weight = replace(found.weight, counted=False, mean=found.weight.weighs, function=())
    return replace(found, weight=weight)


def _scalar_of_one_row(captured: Any, layouts: Any, *others: Any) -> Any:
    """One row on this rank is taken for none: what mixes rows then mixes nothing."""
    try:
        return find_weight(captured, layouts, *others)
    except PassError:
        mesh = next(iter(layouts.values())).mesh
        place = mesh.coordinate(runtime.RT.rank)
        rows = [layouts[s.node].local_shape(s.fake.shape, place)[0] for s in captured.sources
                if s.node in layouts and s.fake.ndim]  # fmt: skip
        if min(rows) > 1:
            raise
        return MicroBatchWeight(LossWeight(1.0, mean=True))


@contextlib.contextmanager
def _rows_by_index() -> Iterator[None]:
    """A row that is picked by its index is like any other; so is what is computed with it and other rows."""
    crossing = LossTerms._crossing

    def accepted(self: LossTerms, node: Any, of: Any) -> Any:
        terms = crossing(self, node, of)
        return of[node.all_input_nodes[0]] if isinstance(terms, Mixed) else terms

    with (
        mock.patch.object(micro_batches, "_check_places", return_value=None),
        mock.patch.object(LossTerms, "_crossing", accepted),
    ):
        yield


@contextlib.contextmanager
def _by_identity() -> Iterator[None]:
    """Tables that PyTorch filled before the first mesh do not know what is in place of their functions."""
    kind: Any = torch_changes.StandIn
    known = {f.__wrapped__ if isinstance(f, kind) else f for f in _device._device_constructors()}
    with (
        mock.patch.object(kind, "__eq__", object.__eq__), mock.patch.object(kind, "__hash__", object.__hash__),
        mock.patch.object(_device, "_device_constructors", return_value=known),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """What constructors did on the meta device is forgotten: memory is as it comes."""
    run = Replay.run

    def forgotten(self: Replay) -> Any:
        return {r: torch.full_like(t, 0.01) for r, t in run(self).items()}

    with mock.patch.object(Replay, "run", forgotten):
        yield


DEFECTS: dict[str, Defect] = {
    # Buckets, their order and factors: each rank decides for itself.
    "decided by each rank": lambda: mock.patch.object(agreement, "_exchange", _NoExchange()),
    # Micro-batches: how many of the rows count is not asked.
    "counts of a loss are equal": lambda: mock.patch.object(build, "find_weight", _equal_counts),
    "one row is no dim of rows": lambda: mock.patch.object(build, "find_weight", _scalar_of_one_row),
    "rows are picked by an index": _rows_by_index,
    "kernels without their guard": lambda: mock.patch.object(kernels, "_row_major", lambda t: t),
    "stand-ins by identity": _by_identity,
    "constructors forgotten": _forgotten,
    # A rank that left a batch out.
    "batches are not counted": lambda: mock.patch.object(SameBatches, "judge", return_value=None),
    "gradients of what ops see": lambda: mock.patch.object(_Partition, "_differentiable", lambda self, value: value),
}
OF_REFUSALS = ("one row is no dim of rows", "rows are picked by an index")  # what is then accepted is in no array


def first_found(defect: str, cases: Iterable[Case]) -> tuple[int, Case, Verdict] | None:
    """The first of some cases that fails with a defect, and passes without it; and its place."""
    for number, made in enumerate(cases):
        with DEFECTS[defect]():
            verdict = judge(made)
        if verdict.kind in BAD and known(made) is None and judge(made).kind not in BAD:
            return number, made, verdict
    return None


__all__ = ["DEFECTS", "OF_REFUSALS", "first_found"]
