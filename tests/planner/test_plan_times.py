"""The picture of how long planning takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plan_times


def test_plans_are_timed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_times, "USUAL_RANKS", 2)
    monkeypatch.setattr(plan_times, "USUAL_LAYERS", 2)
    times = list(plan_times.plan_times((2,), (2,), ((2,),), 1))
    assert [(t.panel, t.point) for t in times] == [("ranks", "2"), ("layers", "2"), ("axes", "1\n2")]
    assert all(t.total > 0 and set(t.seconds) == set(plan_times.COLORS) for t in times)
    plan_times.draw(tmp_path / "images" / "x.svg", times)
    text = (tmp_path / "images" / "x.svg").read_text()
    assert all(word in text for word in ("<svg", "layers (2 ranks)", "axes of a given mesh", *plan_times.COLORS))
    assert str(tmp_path) not in text
