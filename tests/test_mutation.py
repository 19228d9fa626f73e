"""Mutants of the core: those of conversions, whole; ``make mutants`` does the others."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from conformance.mutation.judges import ROOT, SOURCE, judges, modules


def test_no_mutant_of_conversions_is_left() -> None:
    command = [sys.executable, "-m", "conformance.mutation", "conversions", "--tests", "tests/test_conversions.py"]
    done = subprocess.run([*command, "--least", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conversions.py: " in done.stdout
    assert "killed (100.0%" in done.stdout


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
