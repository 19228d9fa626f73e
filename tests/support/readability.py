"""Readability of a page: words per sentence, long sentences, house idioms.  ``python -m tests.support.readability``.

Prose counts: code, HTML comments and tables do not.  Inline code, links and URLs are one word each.  Idioms are also
counted in tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDIOMS = (
    r"\b(told|tells?|said|says?|say|speaks? of|is asked|are asked)\b",
    r"\b(made|makes?|make)\b",
    r"\b(lie|lies|lay|lays|laid|lying)\b",
    r"\b(brings?|brought)\b",
    r"\b(otherwise|apart)\b",
    r"\b(of (its|their|your|one's|the user's|our|his) own|of ours)\b",
    r"\bby name\b",
    r"(?:(?<=^)|(?<=[.:;,] ))[Ww]hat [a-z]+",
    r"\b(such|so is|so are|there is none|that of|those of|none of|is none|are none|nobody)\b",
    r"\b(alike|beside|behind|in front of|all the same|by itself|by themselves)\b",
)


@dataclass(frozen=True)
class Figures:
    """What a page measures.

    Attributes:
        words: words per sentence.
        long: percent of sentences with more than 25 words.
        idioms: house idioms per 1,000 words.
    """

    words: float
    long: float
    idioms: float

    def within(self, other: Figures) -> bool:
        """Whether no figure is larger than the other's."""
        return self.words <= other.words and self.long <= other.long and self.idioms <= other.idioms

    def __str__(self) -> str:
        return f"{self.words} words per sentence, {self.long} % over 25 words, {self.idioms} idioms per 1,000 words"


LIMITS = Figures(16, 10, 6)


def _prose(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs and the cells of tables."""
    text = re.sub(r"<!--.*?-->|<picture>.*?</picture>|\A---$.*?^---$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks: list[str] = []
    cells: list[str] = []
    current: list[str] = []

    def flush() -> None:
        if current:
            blocks.append(" ".join(current))
            current.clear()

    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("|"):
            flush()
            if not re.fullmatch(r"[|:\- ]+", stripped):
                cells += [c.strip() for c in re.split(r"(?<!\\)\|", stripped.strip("|"))]
        elif not stripped or stripped.startswith(("#", "![", ":::", "!!!", "--8<--")):
            flush()
        elif not (line.startswith("    ") and not current):
            if re.match(r"([*+-]|\d+\.) ", stripped):
                flush()
                stripped = re.sub(r"^([*+-]|\d+\.) ", "", stripped)
            current.append(stripped)
    flush()
    return blocks, cells


def _plain(text: str) -> str:
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^`]*``|`[^`]*`", "Code", text)
    return re.sub(r"https?://\S+", "Link", text).replace("**", "").replace("*", "")


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z][A-Za-z'’\-]*|\d[\d.,%]*", text)


def _sentences(blocks: Iterable[str]) -> list[str]:
    ends = r"(?<=[.!?])[\")]*\s+(?=[A-Z\"(`0-9])"
    return [s for b in blocks for s in re.split(ends, _plain(b)) if re.search(r"[A-Za-z]", s)]


def measure(text: str) -> Figures:
    """The figures of a page's text."""
    blocks, cells = _prose(text)
    counts = [n for n in (len(_words(s)) for s in _sentences(blocks)) if n]
    body = " \n".join(map(_plain, blocks + cells))
    idioms = sum(len(re.findall(i, body)) for i in IDIOMS)
    sentences = max(1, len(counts))
    return Figures(
        round(sum(counts) / sentences, 1),
        round(100 * sum(n > 25 for n in counts) / sentences, 1),
        round(1000 * idioms / max(1, len(_words(body))), 1),
    )


def main() -> None:
    """Print a table of all pages."""
    print("| page | words per sentence | % over 25 | idioms per 1,000 words |\n|---|---|---|---|")
    for page in PAGES:
        f = measure(page.read_text())
        mark = "" if f.within(LIMITS) else " *"
        print(f"| {page.relative_to(ROOT).as_posix()}{mark} | {f.words} | {f.long} | {f.idioms} |")
    total = measure("\n\n".join(p.read_text() for p in PAGES))
    print(f"| all | {total.words} | {total.long} | {total.idioms} |")


if __name__ == "__main__":
    main()
