"""How many calls of Python and C one step of the eager way makes: what a clock shows only in quiet, without its noise.

A bound that a change must raise is a cost that it has to argue with.  The counts are those of Python 3.11; later ones
inline comprehensions, and count fewer.
"""

from __future__ import annotations

import cProfile
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meshwright as mw
from bench import block, optimizers
from bench.core import OURS, fake_group
from meshwright.compat import python_dispatch
from meshwright.local_tensor import Sharing

# Where tests of the process before have made a part of a number: a plain one is asked whose it is, too.
_READS_NUMBERS = re.compile(r"call_boxed|<code object read at .*storage\.py")
WARM = 4  # runs after which all plans are what they stay
SPARE = 1.02  # versions of torch and Python differ by a call here and there


def calls(fn: Callable[[], Any]) -> tuple[int, Any]:
    """Calls of Python and C functions in ``fn()``, and what that gives."""
    gc.disable()  # hypothesis, where tests of it ran before, has a function called by each collection
    try:
        with cProfile.Profile() as counted:
            made = fn()
    finally:
        gc.enable()
    return sum(entry.callcount for entry in counted.getstats() if not _READS_NUMBERS.search(str(entry.code))), made


def of_both_ways(forward: Callable[[], Any]) -> tuple[int, int]:
    for _ in range(WARM):
        forward().sum().backward()
    there, made = calls(forward)
    back, _ = calls(made.sum().backward)
    return there, back


@pytest.fixture(autouse=True)
def _rank_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ever", "counted"):  # other tests of the process write through ``.data``
        monkeypatch.setattr(Sharing, name, False)
    # Simulated ranks that enter and leave modes in turn leave PyTorch's flag as one of them found it.
    monkeypatch.setattr(python_dispatch, "_is_in_non_infra_torch_dispatch_mode", False)
    with fake_group(block.DP * block.TP):
        yield


def test_of_a_block() -> None:
    made, x = block.ours()
    there, back = of_both_ways(lambda: made(x))
    assert there <= SPARE * 460  # 3 of them so that hooks of gathered values are called
    assert back <= SPARE * 165


def test_of_a_unit_that_is_stored_in_parts() -> None:
    mesh = mw.init_mesh({"dp": 8})
    made = mw.shard_module(block.whole_block(), mesh, fsdp="dp")
    x = mw.from_local(block.part_of_batch(), mesh, {"dp": mw.Shard(0)}, check=False).requires_grad_()
    there, back = of_both_ways(lambda: made(x))
    assert there <= SPARE * 6465
    assert back <= SPARE * 8498


@pytest.mark.parametrize(("case", "most"), [("AdamW, foreach", 1147), ("AdamW, fused", 352), ("clip_grad_norm_", 77)])
def test_of_optimizers(case: str, most: int) -> None:
    step = optimizers.CASES[case](optimizers.parameters(OURS))
    for _ in range(WARM):
        step()
    assert calls(step)[0] <= SPARE * most
