"""Mutants of the core: a part of them; ``make mutants`` tries all."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from conformance.mutation.judges import ROOT, SMALL, SOURCE, judges, modules


@pytest.mark.processes
@pytest.mark.parametrize(
    ("chosen", "sample", "least"),
    [
        (["rules/factor_notation.py", "strategy_selection/types.py"], 8, 0.7),
        pytest.param(list(SMALL), 30, 0.9, marks=pytest.mark.long),
    ],
    ids=["two modules", "all"],
)
def test_mutants_are_noticed(chosen: list[str], sample: int, least: float) -> None:
    """Of some mutants of what tests without ranks judge: all are of ``make mutants``."""
    command = [sys.executable, "-m", "conformance.mutation", *chosen, "--small"]
    command += ["--sample", str(sample), "--least", str(least)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for module in chosen:
        assert f"\n{module}: " in f"\n{done.stdout}", done.stderr


def test_what_is_recorded_as_equal_is_in_the_code() -> None:
    recorded = tomllib.loads((ROOT / "conformance" / "mutation" / "equal.toml").read_text())
    assert set(recorded) <= set(modules([]))
    for module, entries in recorded.items():
        lines = [line.strip() for line in (SOURCE / module).read_text().splitlines()]
        for entry in entries:
            assert set(entry) == {"function", "was", "now", "why"}, entry
            assert set(entry["was"].splitlines()) <= set(lines), f"{module} has no longer: {entry['was']}"
            assert len(entry["why"]) > 10, entry


def test_modules_and_judges_exist() -> None:
    for module in modules([]):
        assert (SOURCE / module).exists()
        assert all((ROOT / file).exists() for file in judges(module))
