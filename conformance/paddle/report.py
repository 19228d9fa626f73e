"""Counts of verdicts, as tables and as one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from .cases import DIRECTIONS, Given, Slots
from .scoring import REASONS, VERDICTS, Answer, Score

SUPPORTED = [v for v in VERDICTS if v != "unsupported"]
STYLES = {"agree": "green", "freer": "green", "stricter": "yellow", "error": "bold red", "unsupported": "dim"}
TROUBLE = ("stricter", "error")  # an op with one of these has a row of its own


@dataclass
class Tally:
    """How often each verdict was given, by op."""

    ops: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, score: Score) -> None:
        """Count one more."""
        self.ops.setdefault(score.case.op, Counter())[score.verdict] += 1

    @property
    def total(self) -> Counter[str]:
        """Over all ops."""
        return sum(self.ops.values(), Counter())


def tallies(scores: Iterable[Score]) -> dict[str, Tally]:
    """By direction; both are there, and ``both`` together."""
    found = {d: Tally() for d in (*DIRECTIONS, "both")}
    for s in scores:
        found[s.case.direction].add(s)
        found["both"].add(s)
    return found


def percent(counts: Mapping[str, int]) -> dict[str, float]:
    """Each verdict's share of the supported cases."""
    supported = sum(counts.get(v, 0) for v in SUPPORTED)
    return {v: round(100 * counts.get(v, 0) / supported, 2) if supported else 0.0 for v in SUPPORTED}


def summary(scores: Mapping[str, list[Score]], listed: str | None = None) -> dict[str, Any]:
    """Everything, ready for JSON: totals per file, direction and op, and the cases with the verdict ``listed``."""
    everything = [s for found in scores.values() for s in found]
    made: dict[str, Any] = {
        "files": {name: _directions(found) for name, found in scores.items()},
        "all": _directions(everything),
        "reasons": dict(Counter(s.reason for s in everything if s.reason)),
    }
    if listed is not None:
        made["cases"] = [_case(s) for s in everything if s.verdict == listed]
    return made


def _directions(scores: Iterable[Score]) -> dict[str, Any]:
    return {
        direction: _counts(tally.total) | {"ops": {op: _counts(c) for op, c in sorted(tally.ops.items())}}
        for direction, tally in tallies(scores).items()
    }


def _counts(counts: Counter[str]) -> dict[str, Any]:
    supported = sum(counts[v] for v in SUPPORTED)
    return {
        "cases": counts.total(),
        "supported": supported,
        "counts": {v: counts[v] for v in VERDICTS},
        "percent": percent(counts),
    }


def _case(score: Score) -> dict[str, Any]:
    def told(answer: Answer | None) -> dict[str, Any] | None:
        if answer is None:
            return None
        layouts = {"inputs": answer.inputs, "outputs": answer.outputs}
        return {k: [repr(x) for x in v] for k, v in layouts.items()} | {"bytes": round(answer.bytes, 3)}

    case = score.case
    return {
        "where": case.where,
        "op": case.op,
        "direction": case.direction,
        "verdict": score.verdict,
        "reason": score.reason,
    } | {
        "note": score.note,
        "ours": told(score.ours),
        "theirs": told(score.theirs),
    }


# ----------------------------------------------------------------------------------------------- to be seen


def table(title: str, tally: Tally) -> Table:
    """One direction: the total, and the ops that are stricter somewhere or fail."""
    made = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    made.add_column("op", no_wrap=True)
    for name in ("cases", *VERDICTS):
        made.add_column(name, justify="right", no_wrap=True)
    total = tally.total
    made.add_row(*_row(f"all {len(tally.ops)} ops", total))
    shares = percent(total)
    made.add_row(
        "% of supported", "", *[Text(f"{shares[v]:.1f}" if v in shares else "") for v in VERDICTS], style="bold"
    )
    worst = sorted(tally.ops.items(), key=lambda item: (-sum(item[1][v] for v in TROUBLE), item[0]))
    for op, counts in worst:
        if any(counts[v] for v in TROUBLE):
            made.add_row(*_row(op, counts))
    return made


def _row(name: str, counts: Counter[str]) -> list[Text]:
    cells = [
        Text(str(counts[v]) if counts[v] else "·", style=STYLES.get(v, "") if counts[v] else "dim") for v in VERDICTS
    ]
    return [Text(name), Text(str(counts.total())), *cells]


def reasons_table(scores: Sequence[Score]) -> Table:
    """Why some are stricter, with the ops."""
    title = Text("stricter, by reason", style="bold")
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for name in ("reason", "cases"):
        made.add_column(name, no_wrap=True, justify="left" if name == "reason" else "right")
    made.add_column("why, and the ops")
    for reason, why in REASONS.items():
        ops = Counter(s.case.op for s in scores if s.reason == reason)
        listed = ", ".join(f"{op} {n}" for op, n in ops.most_common())
        made.add_row(Text(reason), Text(str(ops.total())), Text.assemble(why, "\n", (listed or "none", "dim")))
    return made


def unsupported_line(tally: Tally) -> Text:
    """The ops of which no case is supported."""
    names = sorted(op for op, counts in tally.ops.items() if counts["unsupported"] == counts.total())
    return Text("no rule: " + (", ".join(names) or "none"), style="dim")


def lines_of(score: Score) -> Text:
    """One case, with both answers."""
    case = score.case
    asked = f"{_slots(case.inputs)}" + (f" wishing {_slots(case.outputs)}" if case.outputs else "")
    made = Text.assemble((f"{case.where}: ", "dim"), (case.op, "bold"), f" {case.direction} {asked} {dict(case.attrs)}")
    for who, answer in (("ours", score.ours), ("theirs", score.theirs)):
        if answer is not None:
            made.append(
                f"\n  {who:6}  {_layouts(answer.inputs)} -> {_layouts(answer.outputs)}, {answer.bytes:.0f} bytes"
            )
    if score.note:
        made.append(f"\n  {score.note}", style="yellow")
    return made


def _slots(slots: Slots) -> str:
    return ", ".join(
        f"[{_slots(list(slot))}]" if isinstance(slot, list)
        else f"{'x'.join(map(str, slot.shape or ()))} {slot.layout!r}" if isinstance(slot, Given)
        else repr(slot and slot.value)
        for slot in slots
    )  # fmt: skip


def _layouts(layouts: Iterable[Any]) -> str:
    return ", ".join(map(repr, layouts))
