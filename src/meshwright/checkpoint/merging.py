"""What a captured step has beside model and optimizer: sums of gradients in the middle of a merge, the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..dispatch import disabled
from ..errors import CheckpointError
from ..layout import Shard, Spec
from ..ranks import runtime
from ..resharding import executor
from ..resharding.planner import plan as plan_conversion
from ..tensor import DistTensor, wrap

Tensor = torch.Tensor


def merge_state(program: Any, put: Callable[[str, Tensor], str]) -> dict[str, Any]:
    """As JSON; ``put`` takes the tensors.  Every rank calls it: sums are reduced.

    Raises:
        CheckpointError: in the middle of a merge of a step that was written by hand, whose sums belong to their ranks.
    """
    carrier = program.carrier
    sums = {}
    if program.micro_step:
        for name, spec in _specs(program).items():
            sums[name] = put(f"other/sum/{name}", reduced(carrier.sums[name], spec))
    scale = {name: put(f"other/scale/{name}", t) for name, t in carrier.scale.items()}
    return {"micro_step": program.micro_step, "sums": sums, "scale": scale}


def _specs(program: Any) -> dict[str, Spec]:
    specs = program.cycle.specs
    if any(spec is None for spec in specs.values()):
        raise CheckpointError(
            f"the step is after micro-step {program.micro_step} of a merge and was written by hand, so that its sums "
            "belong to its ranks: save between updates, or call step.flush() first"
        )
    return {name: spec for name, spec in specs.items() if spec is not None}


def _whole_spec(spec: Spec) -> Spec:
    """How a sum is saved and read: what is Partial reduced, and split along its first dim where that goes."""
    layout = spec.layout
    for axis in layout.partial:
        split = spec.ndim and 0 not in layout.dim_axes() and spec.shape[0] >= spec.mesh.sizes[axis]
        layout = layout.replace(axis, Shard(0)) if split else layout.without_partial([axis])
    return Spec(spec.shape, spec.dtype, layout)


def reduced(local: Tensor, spec: Spec) -> DistTensor:
    """A sum whose parts ranks hold, as it is saved; all ranks call it."""
    target = _whole_spec(spec)
    with torch.no_grad(), disabled():
        source = Spec(spec.shape, local.dtype, spec.layout)
        made = executor.apply(plan_conversion(source, target.with_(dtype=local.dtype)).steps, local)
        return wrap(made.clone() if made is local else made, target)


def restore_merge(
    program: Any, saved: Mapping[str, Any], fill: Callable[[str, Tensor, Spec], Tensor], whole: Callable[[str], Tensor]
) -> list[Callable[[], None]]:
    """Plan to bring a step to where it was saved; what is to be done when tensors were read.

    Args:
        fill, whole: have a tensor filled that is given; a new one.

    Raises:
        CheckpointError: a step of another merge or loss scale.
    """
    carrier, micro = program.carrier, saved["micro_step"]
    steps: list[Callable[[], None]] = []
    if set(saved["scale"]) != set(carrier.scale):
        raise CheckpointError(f"it has {sorted(saved['scale'])} of a loss scale, this step has {sorted(carrier.scale)}")
    for name, stored in saved["scale"].items():
        steps.append(partial(_copy, carrier.scale[name], whole(stored)))
    k = program.cycle.calls
    if micro >= k:
        raise CheckpointError(f"it was saved after micro-step {micro} of a merge, and this step updates every {k}")
    specs = _specs(program) if micro else {}
    if set(saved["sums"]) != set(specs):
        other = sorted(set(saved["sums"]) ^ set(specs))[0]
        raise CheckpointError(f"it was saved in the middle of another merge: only one of both has a sum for {other}")
    for name, spec in specs.items():
        target = _whole_spec(spec)
        here = spec.mesh.coordinate(runtime.RT.rank)
        read = torch.empty(target.local_shape(here), dtype=target.dtype, device=carrier.sums[name].device)
        fill(saved["sums"][name], read, target)
        steps.append(partial(_spread, carrier.sums[name], read, target, spec))
    if not micro:
        steps += [t.zero_ for t in carrier.sums.values()]
    steps.append(partial(setattr, program.cycle, "done", micro))
    return steps


def _copy(into: Tensor, value: Tensor) -> None:
    into.copy_(value)


def _spread(into: Tensor, value: Tensor, read: Spec, spec: Spec) -> None:
    """Bring a sum that was read to how the step holds it: what is Partial on one rank, zeros elsewhere."""
    with torch.no_grad(), disabled():
        into.copy_(executor.apply(plan_conversion(read, Spec(spec.shape, read.dtype, spec.layout)).steps, value))


__all__ = ["merge_state", "reduced", "restore_merge"]
