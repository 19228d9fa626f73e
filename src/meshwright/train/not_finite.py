"""A loss that is no number: the update is left out, and the step runs again to find the op that made it so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor

from meshwright import collective
from meshwright.compat import pytree
from meshwright.errors import DataError
from meshwright.mesh import Mesh
from meshwright.verification.watch import Observed, Watch


class _Found(NamedTuple):
    """The first value of a kind on a rank; ``place``: how many values it had computed before."""

    place: int = 1 << 62
    text: str = ""


class _Search:
    """Looks at what a step computes for the first NaN and the first infinity."""

    def __init__(self) -> None:
        self.seen, self.nan, self.infinite = 0, _Found(), _Found()

    def __call__(self, one: Observed) -> None:
        self.seen += 1
        value = one.value if one.name or ".py:" in one.line else None  # no copy of a gradient, made by a library
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and not self.nan.text:
            if bool(value.isnan().any()):
                self.nan = _Found(self.seen, f"NaN in {_in_words(one)}")
            elif not self.infinite.text and bool((value == math.inf).any()):  # masks have the negative one
                self.infinite = _Found(self.seen, f"infinity in {_in_words(one)}")


def _in_words(one: Observed) -> str:
    of = "the gradient of " if one.key[0] in ("backward", "grad") else ""
    where = f" at {one.line}" if one.line else ""
    return f"{of}{one.name or f'the result of {one.op}'}{where}"


def check_finite(
    step: int, loss: float, norm: Tensor | None, mesh: Mesh, model: nn.Module, again: Callable[[], None] | None,
    batches: Any,
) -> None:  # fmt: skip
    """Raise where the loss, or the norm of the gradients, of a step is no number; before its update.

    Args:
        again: computes the gradients once more with the same batches and random numbers; None of a captured step.

    Raises:
        DataError: on every rank, naming step, rank, op, line and tensor.
    """
    if math.isfinite(loss) and (norm is None or bool(norm.isfinite())):
        return
    what = f"step {step + 1}: the loss is {loss}"
    if math.isfinite(loss):
        what = f"step {step + 1}: the loss is {loss:.4g}, the norm of its gradients {float(norm or 0)}"
    saved = "Checkpoints have the weights of earlier steps"
    if again is None:
        raise DataError(f"{what}, and the captured step has updated with it. {saved}: resume without --static, which "
                        "names the op")  # fmt: skip
    names = {id(p): name for name, p in model.named_parameters()}
    for i, batch in enumerate(batches):
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
            names[id(leaf)] = f"batch{pytree.keystr(path)}" + (f" of micro-step {i + 1}" if len(batches) > 1 else "")
    search = _Search()
    with Watch(search, names):
        again()
    told = collective.all_gather_object((search.infinite, search.nan), collective.group(mesh), "search for NaN")
    texts = []
    for kind in zip(*told, strict=True):
        place, rank, text = min((found.place, i, found.text) for i, found in enumerate(kind))
        if text:
            texts.append((place, text + (f" on rank {mesh.ranks[rank]}" if mesh.size > 1 else "")))
    first = ", then ".join(text for _, text in sorted(texts)) or "nothing of the kind when the step was repeated"
    raise DataError(f"{what}; first there was {first}. The update was not made. {saved}")


__all__ = ["check_finite"]
