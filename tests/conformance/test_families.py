"""``mw.layouts`` on families of transformers, as ``conformance/families.py`` runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the families are those of the transformers library")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "conformance"))

import families
from doubled import float64

FAST = ("gpt_neox", "qwen3_moe")
LONG = ("llama", "phi3", "mamba", "t5", "vit", "falcon", "bert")


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)])
def test_equals_one_device(name: str) -> None:
    subject = families.subjects("transformers")[name]
    subject.make()  # imports its modules
    with float64():
        row = next(families.Family(name, subject).rows([("tp3", "eager")], limit=240))
    assert row.verdict == "right", row
    assert row.split > 0.5
