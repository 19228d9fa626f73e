"""Steps without numbers: the update is left out, and the step runs again to find the op that made it so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor

from meshwright import collective
from meshwright.compat import pytree
from meshwright.dispatch import disabled
from meshwright.errors import DataError
from meshwright.mesh import Mesh
from meshwright.program.run.replay import RUNNING
from meshwright.tensor import local_data
from meshwright.verification.watch import Observed, Watch

SAVED = "Checkpoints have the weights of earlier steps"


class _First(NamedTuple):
    """The first value of a kind on a rank; ``place``: how many values it had computed before."""

    place: int = 1 << 62
    text: str = ""


class NotFiniteSearch:
    """Looks at what a step computes for the first NaN and the first infinity.

    Args:
        blame: of a parameter's name, what of the update before is to blame, in words.

    Attributes:
        where: words after each value.
    """

    where = ""

    def __init__(self, blame: Callable[[str], str] = lambda name: "") -> None:
        self.blame = blame
        self.seen, self.nan, self.infinite = 0, _First(), _First()

    def observe(self, one: Observed) -> None:
        """A value of an eager step."""
        if one.name or ".py:" in one.line:  # no copy of a gradient, made by a library
            of = "the gradient of " if one.key[0] in ("backward", "grad") else ""
            self.see(f"{of}{one.name or f'the result of {one.op}'}", one.line, one.value)
        else:
            self.seen += 1

    def see(self, words: str, line: str, value: Any) -> None:
        """A value, in words, and the user's line that computed it."""
        self.seen += 1
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel() or self.nan.text:
            return
        if bool(value.isnan().any()):
            self.nan = _First(self.seen, self._text("NaN", words, line))
        elif not self.infinite.text and bool((value == math.inf).any()):  # masks have the negative one
            self.infinite = _First(self.seen, self._text("infinity", words, line))

    def _text(self, what: str, words: str, line: str) -> str:
        return f"{what} in {words}{f' at {line}' if line else ''}{self.where}{self.blame(words)}"

    def over_ranks(self, mesh: Mesh) -> str:
        """What came first on any rank."""
        heard = collective.all_gather_object((self.infinite, self.nan), collective.group(mesh), "search for NaN")
        texts = []
        for kind in zip(*heard, strict=True):
            place, rank, text = min((first.place, i, first.text) for i, first in enumerate(kind))
            if text:
                texts.append((place, text + (f" on rank {mesh.ranks[rank]}" if mesh.size > 1 else "")))
        return ", then ".join(text for _, text in sorted(texts))


def check_finite(
    step: int, loss: float, norm: float, mesh: Mesh, search: NotFiniteSearch, again: Callable[[NotFiniteSearch], None],
    updated: bool = False,
) -> None:  # fmt: skip
    """Raise where the loss of a step, or the norm of its gradients, is not finite.

    Args:
        norm: the same on all ranks, as the loss.
        again: runs the step again and shows the search its values.
        updated: whether the update was made; else nothing has changed.

    Raises:
        DataError: on every rank, naming step, rank, op, line and tensor.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"step {step + 1}: the loss is {loss:.4g}"
    if math.isfinite(loss):
        what += f", the norm of its gradients {norm}"
    again(search)
    first = search.over_ranks(mesh) or "nothing of the kind when the step was repeated"
    raise DataError(f"{what}; first there was {first}. The update was {'' if updated else 'not '}made. {SAVED}")


def observe_eagerly(search: NotFiniteSearch, model: nn.Module, batches: Any, again: Callable[[], None]) -> None:
    """Show a search what an eager step computes."""
    owned = [*model.named_parameters(), *model.named_buffers()]
    names = {id(t): name for name, t in owned if not name.endswith(RUNNING)}
    for i, batch in enumerate(batches):
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
            names[id(leaf)] = f"batch{pytree.keystr(path)}" + (f" of micro-step {i + 1}" if len(batches) > 1 else "")
    with Watch(search.observe, names):
        again()


def blame(model: nn.Module, optimizer: Any) -> Callable[[str], str]:
    """What of an update makes the parameter of a name not finite: numbers of its group, states."""
    parameters = dict(model.named_parameters())

    def of(name: str) -> str:
        p = parameters.get(name)
        listed = ", ".join(_suspects(p, optimizer)) if p is not None else ""
        return f" (the update before has {listed})" if listed else ""

    return of


def _suspects(p: Tensor, optimizer: Any) -> Iterator[str]:
    group: dict[str, Any] = next((g for g in optimizer.param_groups if any(q is p for q in g["params"])), {})
    for key, value in group.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key} {value}"
    for key, state in optimizer.state.get(p, {}).items():
        if isinstance(state, Tensor) and not _is_finite(state):
            yield f"values that are not finite in the optimizer's state {key}"


def _is_finite(t: Tensor) -> bool:
    with disabled():
        local = local_data(t)
        return not local.is_floating_point() or bool(local.isfinite().all())


def check_weights(step: int, mesh: Mesh, model: nn.Module, optimizer: Any) -> None:
    """Raise where an update made weights that are not finite, before they are saved.

    Raises:
        DataError: on every rank, naming the parameter and what of the update is to blame.
    """
    with collective.together(mesh, f"step {step + 1}: the weights after the update", kind=DataError):
        for name, p in model.named_parameters():
            if not _is_finite(p):
                why = blame(model, optimizer)(name)
                raise DataError(
                    f"step {step + 1}: {name} is not finite after the update{why}. It is not saved. {SAVED}"
                )


__all__ = ["NotFiniteSearch", "blame", "check_finite", "check_weights", "observe_eagerly"]
