"""Fragments of the changelog: names that towncrier finds, and lines that a user can read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
KINDS = [t["directory"] for t in CONFIG["type"]]
IGNORED = set(CONFIG["ignore"])


def complaints(name: str, text: str) -> list[str]:
    """What is wrong with a fragment."""
    found = []
    if not re.fullmatch(rf"[\w-]+\.({'|'.join(KINDS)})\.md", name):
        found.append(f"{name}: name it <any-name>.<type>.md, type one of {', '.join(KINDS)}")
    if len(text.strip().splitlines()) != 1:
        found.append(f"{name}: one line was expected")
    if max(map(len, text.splitlines()), default=0) > 120:
        found.append(f"{name}: longer than 120 characters")
    return found


def test_fragments_have_names_that_towncrier_finds_and_one_short_line() -> None:
    found = [p for p in sorted((ROOT / CONFIG["directory"]).iterdir()) if p.name not in IGNORED]
    assert [c for p in found for c in complaints(p.name, p.read_text())] == []


def test_a_wrong_fragment_is_seen() -> None:
    assert complaints("a.fixed.md", "`mw.x`: y.\n") == []
    assert len(complaints("a.md", "two\nlines\n")) == 2
    assert len(complaints("a.fix.md", "x" * 121)) == 2


def test_the_changelog_has_the_place_for_the_next_version() -> None:
    assert CONFIG["start_string"] in (ROOT / "CHANGELOG.md").read_text()
