"""The script of the five lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "conformance"))

import verified


def test_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert verified.main(["--models", "vit", "--mesh", "tp=3"]) == 0
    name, _, eager, captured = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert name == "vit"
    assert "right" in eager
    assert "right" in captured
