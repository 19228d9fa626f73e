"""Models of transformers on meshes against one device, as ``make conformance-models`` runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the oracle is the transformers library")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "conformance"))

import models
import zoo

FAST = {("qwen3", "tp3"), ("gemma3", "tp3"), ("mamba", "tp3"), ("olmo2", "dp2tp2")}


ROWS = [
    pytest.param(
        *(name, mesh, plan, mode),
        marks=() if (name, mesh) in FAST and (plan, mode) == ("megatron", "eager") else pytest.mark.long,
        id=f"{name}-{mesh}-{plan}-{mode}",
    )
    for name, case in zoo.CASES.items()
    for mesh in ("dp2tp2", "tp3")
    for plan, mode in [*((plan, "eager") for plan in zoo.PLANS), ("megatron", "static")]
    if case.needs == "transformers"
]


@pytest.mark.parametrize(("name", "mesh", "plan", "mode"), ROWS)
def test_equals_one_device(name: str, mesh: str, plan: str, mode: str) -> None:
    row = models.measure(name, plan, mesh, mode, trace=not zoo.CASES[name].uncaptured)
    assert not row.problem, row.problem


def test_differences_are_seen() -> None:
    """The judge's own test: one gradient that is a millionth off, a missing one, a NaN."""
    want = models.single("gpt2").gradients
    assert models.furthest(want, want, "gradient") == 0
    name = next(iter(want))
    assert models.furthest(want | {name: want[name] * (1 + 1e-6)}, want, "gradient") > 1e-7
    assert models.furthest(want | {name: want[name] * float("nan")}, want, "gradient") == float("inf")
    with pytest.raises(AssertionError, match="gradient missing of"):
        models.furthest({k: v for k, v in want.items() if k != name}, want, "gradient")
