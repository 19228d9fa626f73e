"""Every page reads easily: at most 16 words per sentence, 10 % over 25 words, 6 house idioms per 1,000 words."""

from __future__ import annotations

import pytest

from tests.support.readability import LIMITS, PAGES, ROOT, Figures, measure

NAMES = [p.relative_to(ROOT).as_posix() for p in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_reads_easily(name: str) -> None:
    found = measure((ROOT / name).read_text())
    assert found.within(LIMITS), f"{name}: {found}; allowed: {LIMITS}"


def test_long_sentences_and_idioms_are_counted() -> None:
    text = "What is told is refused by name. " + "Word " * 30 + "end.\n"
    assert measure(text) == Figures(19.0, 50.0, 78.9)
    assert measure("```python\nsaid = made\n```\n| a | b |\n|---|---|\n| it is told | b |\n") == Figures(
        0.0, 0.0, 166.7
    )
