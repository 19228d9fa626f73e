"""Loss scaling in a program: gradients of a scaled loss, and one flag that says whether any is not finite.

As ``torch.amp.GradScaler``, but the host waits for nothing: the backward starts from the scale, gradients are unscaled
after they were summed, an update is skipped on all ranks if any gradient on any rank overflowed, and then the scale
backs off; otherwise it grows after a while.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from ...errors import ProgramError
from ...layout import Layout, Partial, Spec
from ...mesh import Mesh
from ...resharding import executor, record
from ...resharding.planner import plan as plan_conversion
from ..ir.nodes import annotate, info_of
from ..ir.program import Input
from ..ir.trace import Recorder

Tensor = torch.Tensor
aten = torch.ops.aten

SCALE, GROWTH = "loss_scale", "loss_scale.growth"


@dataclass(frozen=True)
class LossScale:
    """Loss scaling for float16 compute, `compile_step(loss_scale=)`.

    PyTorch: `torch.amp.GradScaler`.

    Attributes:
        init: First scale.
        growth_factor: Factor after `growth_interval` updates in a row without overflow.
        backoff_factor: Factor after an overflow.
        growth_interval: Number of updates. `None` keeps the scale fixed; updates that overflow are still skipped.
        check_loss: Skip an update whose loss is not finite, too, even if all gradients are.

    Raises:
        ProgramError: If a number is out of range.

    Examples:
        ```python
        scale = mw.LossScale(init=1024.0, growth_interval=100)
        assert scale.backoff_factor == 0.5
        ```
    """

    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | None = 2000
    check_loss: bool = False

    def __post_init__(self) -> None:
        good = 0 < self.init < math.inf and self.growth_factor > 1 and 0 < self.backoff_factor < 1
        if not good or (self.growth_interval is not None and self.growth_interval < 1):
            raise ProgramError(
                f"{self}: a finite init above 0, growth_factor above 1, backoff_factor between 0 and 1 and a "
                "growth_interval of at least 1 were expected"
            )

    @staticmethod
    def of(given: object) -> LossScale | None:
        """What a user said of a loss scale: ``"dynamic"``, a number, one of these or None."""
        if given is None or isinstance(given, LossScale):
            return given
        if given == "dynamic":
            return LossScale()
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            return LossScale(float(given), growth_interval=None)
        raise ProgramError(f"loss_scale={given!r}: 'dynamic', a number or a LossScale was expected")

    def state(self, device: str) -> dict[str, Tensor]:
        """What of it changes from step to step: the scale, and the updates since it changed or overflowed."""
        made = {SCALE: torch.tensor(self.init, dtype=torch.float32, device=device)}
        if self.growth_interval is not None:
            made[GROWTH] = torch.zeros((), dtype=torch.int32, device=device)
        return made


class Scaling:
    """A loss scale in a program that is being recorded.

    Args:
        recorder: before its first op.
    """

    def __init__(self, how: LossScale, recorder: Recorder, mesh: Mesh) -> None:
        self.how, self.recorder, self.mesh = how, recorder, mesh
        self.inputs: list[Input] = []
        self.made: dict[str, Tensor] = {}
        for name, like in how.state("cpu").items():
            self.made[name] = fake = torch.empty((), dtype=like.dtype, device=mesh.device)
            recorder.placeholder(name.replace(".", "_"), fake)
            self.inputs.append(Input(name, "scale"))
        self.found: Tensor | None = None

    def seed(self, seed: Tensor) -> Tensor:
        """What the backward starts from."""
        return (seed * self.made[SCALE]).to(seed.dtype)

    def spoil(self, grad: Tensor, loss: Tensor) -> Tensor:
        """A gradient, filled with NaN where the loss is not finite: sums over calls and ranks keep it."""
        local = loss.detach()
        return grad.masked_fill((local - local) != 0, math.nan)

    def unscale(self, grads: Mapping[str, Tensor], kept: Collection[int]) -> dict[str, Tensor]:
        """Gradients without the scale, in memory of their own; notes whether any is not finite, on any rank.

        Args:
            kept: storages that others look at later.
        """
        made = self._apart(grads, set(kept))
        inverse = self.made[SCALE].double().reciprocal().float()
        found = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for dtype in dict.fromkeys(g.dtype for g in made.values()):
            nodes = [self.recorder.node_of(g) for g in made.values() if g.dtype is dtype]
            self._emit(aten._amp_foreach_non_finite_check_and_unscale_.default, nodes, found, inverse)
        split = Spec((), found.dtype, Layout(self.mesh, [Partial("max")] * self.mesh.ndim))
        steps = plan_conversion(split, Spec((), found.dtype, Layout(self.mesh)))
        with record.asked("found_inf", steps, "an update is skipped on all ranks if a gradient on any is not finite"):
            self.found = executor.apply(steps.steps, found)
        return made

    def found_inf(self) -> fx.Node:
        """The node that says whether a gradient was not finite."""
        assert self.found is not None
        return self.recorder.node_of(self.found)

    def taken(self) -> fx.Node:
        """1 if the update is taken, 0 if it is skipped."""
        assert self.found is not None
        return self.recorder.node_of(1 - self.found)

    def adapt(self) -> None:
        """Let the scale grow or back off."""
        how = self.how
        if how.growth_interval is not None:
            assert self.found is not None
            self._emit(
                aten._amp_update_scale_.default, self.made[SCALE], self.made[GROWTH], self.found,
                how.growth_factor, how.backoff_factor, how.growth_interval,
            )  # fmt: skip

    def _emit(self, target: object, *args: object) -> None:
        nodes = tuple(self.recorder.node_of(a) if isinstance(a, Tensor) else a for a in args)
        node = self.recorder.emit(target, nodes)
        if isinstance(nodes[0], fx.Node):
            annotate(node, value=info_of(nodes[0]).value)

    def _apart(self, grads: Mapping[str, Tensor], kept: set[int]) -> dict[str, Tensor]:
        """Gradients that share memory with others, or do not fill theirs, as copies: unscaling writes to them."""
        made = {}
        for name, g in grads.items():
            value = self.recorder.value(g)
            if value.storage in kept or value.nbytes != g.numel() * g.element_size():
                spec = g.__dict__["_spec"]
                g = g.clone(memory_format=torch.contiguous_format)
                g.__dict__["_spec"] = spec
            kept.add(value.storage)
            made[name] = g
        return made


__all__ = ["GROWTH", "SCALE", "LossScale", "Scaling"]
