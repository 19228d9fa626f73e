"""How the local function of a rule communicates: ``ctx.comm``, one method for each way, each with its transpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import collective
from ..mesh import Mesh
from ..rules.strategies import AllToAllSpec, Spans
from . import exchange
from .rows import RowExchange
from .sending import Send, recorded, sent

Tensor = torch.Tensor


@dataclass(frozen=True)
class LocalComm:
    """What ranks send each other in one call of an op: differentiable, recorded as conversions are.

    All that decides on a collective is metadata, which all ranks share: every rank of the group makes the same calls.

    Attributes:
        op: the name of the op, for records.
        mesh: of which ``axes`` in the methods are axes, by number.
    """

    op: str
    mesh: Mesh

    def permute(self, x: Tensor, axes: tuple[int, ...], targets: Sequence[int], why: str) -> Tensor:
        """What the rank sends whose target this one is; the gradient goes the other way.

        Args:
            x: of the same shape on all ranks of the group.
            axes: the mesh axes of the group.
            targets: to which position the rank at each position of the group sends.
            why: for the record.
        """
        inverse = tuple(targets.index(i) for i in range(len(targets)))
        return self._sent(x, axes, Send("permute", (tuple(targets),), "permute", (inverse,)), why)

    def all_to_all(
        self, x: Tensor, axes: tuple[int, ...], way: AllToAllSpec, why: str, phase: str = "forward"
    ) -> Tensor:
        """An all-to-all over the group of some axes; the gradient goes back."""
        return self._sent(x, axes, Send("all_to_all", tuple(way), "all_to_all", tuple(way.back())), why, phase)

    def all_gather(
        self, x: Tensor, axes: tuple[int, ...], dim: int, sizes: Sequence[int], why: str, phase: str = "forward"
    ) -> Tensor:
        """The parts of all ranks along a dim, of these sizes, one behind the other; gradients are added up."""
        said = dim, tuple(sizes)
        return self._sent(x, axes, Send("all_gather", said, "reduce_scatter", said), why, phase)

    def reduce_scatter(
        self, x: Tensor, axes: tuple[int, ...], dim: int, sizes: Sequence[int], why: str, phase: str = "forward"
    ) -> Tensor:
        """The own part of the sum over all ranks: the transpose of :meth:`all_gather`."""
        said = dim, tuple(sizes)
        return self._sent(x, axes, Send("reduce_scatter", said, "all_gather", said), why, phase)

    def gather_numbers(self, x: Tensor, axes: tuple[int, ...], why: str) -> Tensor:
        """Values of all ranks of a group, one below the other: numbers that take no gradient, of one shape."""
        n = collective.group(self.mesh, axes).size
        return self.all_gather(x.detach(), axes, 0, [x.shape[0]] * n, why)

    def fetch_rows(self, x: Tensor, dim: int, axes: tuple[int, ...], held: Spans, wanted: Spans, why: str) -> Tensor:
        """The rows that this rank wants, wherever they are; their gradients go back there and are added up.

        Args:
            x: the rows that this rank has, along ``dim``; what lies behind them is left alone.
            axes: the mesh axes of the group.
            held: of each rank of the group, (start, stop) of the rows that it has, in the order in which they lie.
            wanted: of each rank, the rows that it wants, likewise; each of them is held by one rank.
            why: for the record.

        Raises:
            ExplicitError: inside ``mw.explicit()``, where something would be sent.
        """
        return exchange.fetch_rows(self.op, self.mesh, x, dim, axes, held, wanted, why)

    def route_rows(self, axes: tuple[int, ...], sizes: tuple[int, ...], why: str) -> RowExchange:
        """Rows that go to ranks which values choose (tokens to experts), of ranks that have so many rows each."""
        return RowExchange(self.op, self.mesh, axes, sizes, why)

    def _sent(self, x: Tensor, axes: tuple[int, ...], send: Send, why: str, phase: str = "forward") -> Tensor:
        group = collective.group(self.mesh, axes)
        there = send.bytes(x, group)
        return sent(x, send, group, recorded(self.op, send.kind, x, x.shape, group, why, there, there, phase))


__all__ = ["LocalComm"]
