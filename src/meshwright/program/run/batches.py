"""How the batches of a step are nested: as the example, whatever the order of a dict's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...compat import pytree
from ...errors import ProgramError

Tensor = torch.Tensor


class BatchStructure:
    """The nesting of the example, which that of each batch must be."""

    def __init__(self, example: Any) -> None:
        self._tree = pytree.tree_flatten(example)[1]
        self._places = pytree.tree_flatten(_tuples(example))[1]

    @property
    def size(self) -> int:
        """How many leaves a batch has."""
        return int(self._tree.num_leaves)

    def nested(self, leaves: Sequence[Any]) -> Any:
        """The batch that has these leaves."""
        return pytree.tree_unflatten(list(leaves), self._tree)

    def leaves(self, batch: Any) -> list[Any]:
        """The leaves of a batch in the order of the example's.

        Raises:
            ProgramError: it is nested in another way.
        """
        leaves, tree = pytree.tree_flatten(batch)
        if tree == self._tree:
            return leaves
        try:
            leaves = self._places.flatten_up_to(_tuples(batch))
            if any(isinstance(leaf, (tuple, dict)) for leaf in leaves):  # where one value was
                raise ValueError
            return leaves
        except ValueError:
            given, wanted = (_words(pytree.tree_unflatten(["_"] * t.num_leaves, t)) for t in (tree, self._tree))
            raise ProgramError(
                f"the batch is {given}, the step was captured for {wanted}: give it what it was captured for"
            ) from None


def split_batch(batch: Any, k: int, dim: int) -> list[Any]:
    """A batch as ``k`` micro-batches, cut along ``dim``.

    Raises:
        ProgramError: ``k`` does not divide a tensor's size.
    """
    leaves, tree = pytree.tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.shape[dim] % k:
            raise ProgramError(
                f"a batch tensor of shape {tuple(leaf.shape)} cannot be cut into {k} micro-batches along dim "
                f"{dim}: {k} does not divide {leaf.shape[dim]}; give a batch that it divides, or another k_steps"
            )
    cut = [leaf.chunk(k, dim) if isinstance(leaf, Tensor) else [leaf] * k for leaf in leaves]
    return [pytree.tree_unflatten([c[i] for c in cut], tree) for i in range(k)]


def shapes_of(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Of the tensors of a batch."""
    return tuple([tuple(x.shape) for x in leaves if isinstance(x, Tensor)])


def _words(batch: Any) -> str:
    """What a batch consists of, in words."""
    if isinstance(batch, dict):
        return f"a dict of {', '.join(f'{k}: {_words(v)}' for k, v in batch.items())}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {', '.join(map(_words, batch)) or 'nothing'}"
    return "a tensor"


def _tuples(batch: Any) -> Any:
    """A batch with tuples in place of its lists: loaders give one for the other."""
    if isinstance(batch, list) or type(batch) is tuple:
        return tuple(map(_tuples, batch))
    return {k: _tuples(v) for k, v in batch.items()} if type(batch) is dict else batch


__all__ = ["BatchStructure", "shapes_of", "split_batch"]
