"""All pairs of the table's values and all meetings of three (long), against one device."""

from __future__ import annotations

import functools
import itertools
import os
import re
from pathlib import Path

import pytest

from tests.conftest import SALT

from . import judge as judges
from .arrays import array, meetings, refused_cases
from .broken import DEFECTS, OF_REFUSALS, first_found
from .factors import DEFAULTS, FACTORS, Case, case, short
from .judge import BAD, Verdict, judge, script, shrink
from .limits import APART, REFUSED, Refusal, known, meets

PAIRS = list(array(2, ""))
PARTS = 64  # of the meetings of three: as many tests
DOCS = Path(__file__).parents[2] / "docs"


def _checked(made: Case) -> str:
    """A script, where a case fails."""
    verdict = judge(made)
    if verdict.kind not in (*BAD, "invalid"):
        return ""
    if (row := known(made)) is not None:
        return "" if verdict.kind != "invalid" else row.why
    return script(*(shrink(made, verdict) if verdict.kind != "invalid" else (made, verdict)))


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int) -> None:
    found = _checked(PAIRS[number])
    assert not found, f"case {number} of pairs, made smaller:\n{found}"


@functools.cache
def _threes(salt: str) -> list[Case]:
    return list(array(3, salt))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_threes(part: int) -> None:
    salt = os.environ[SALT]
    found = [text for made in _threes(salt)[part::PARTS] if (text := _checked(made))]
    scripts = "\n".join(sorted(set(found)))
    assert not found, f"{len(found)} cases of --salt {salt}, part {part}, made smaller:\n{scripts}"


# ------------------------------------------------------------------------------------------ of the arrays


def _goes(values: Case) -> bool:
    """Whether there is a case with these values and defaults, but for the mode."""
    never = [row.when for row in (*APART, *(r for r in REFUSED if r.always))]
    tries = ({**DEFAULTS, **more, **values} for more in ({"mode": m} for m in FACTORS["mode"]))
    return any(not any(meets(made, when) for when in never) for made in tries)


def test_all_pairs_meet_that_go_together() -> None:
    met = meetings(PAIRS, 2)
    for a, b in itertools.combinations(sorted(FACTORS), 2):
        for pair in itertools.product(FACTORS[a], FACTORS[b]):
            values = dict(zip((a, b), pair, strict=True))
            assert tuple(sorted(values.items())) in met or not _goes(values), values


def test_a_salt_gives_other_cases() -> None:
    assert list(array(2, "other")) != PAIRS == list(array(2, ""))


@pytest.mark.parametrize("row", REFUSED, ids=lambda r: r.promise)
def test_what_is_refused_is_promised_and_refused(row: Refusal) -> None:
    text = " ".join((DOCS / row.page).read_text().split())
    assert " ".join(row.promise.split()) in text
    if row.always:
        cases = list(refused_cases(row, "", ("rows",)))  # a refusal is forgotten first for parts of another size
        assert len(cases) > 2
        for made in cases:
            verdict = judge(made)
            assert verdict.kind == "refused", (short(made), verdict)
            assert row.says


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", [r for r in REFUSED if r.always], ids=lambda r: r.promise)
def test_what_is_refused_is_refused_beside_every_value(row: Refusal) -> None:
    for made in refused_cases(row, os.environ[SALT]):
        verdict = judge(made)
        assert verdict.kind == "refused", script(made, verdict)


# ------------------------------------------------------------------------------------------ of the judge


def test_a_finding_is_shrunk_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(made: Case) -> Verdict:
        bad = made["block"] == "mlp" and made["rows"] != "even"
        return Verdict("wrong", "loss 0.0: off by 1 of 1 on rank 0") if bad else Verdict("equal")

    monkeypatch.setattr(judges, "judge", planted)
    found = next(c for c in PAIRS if planted(c).kind == "wrong")
    smallest, verdict = shrink(found, planted(found))
    assert short(smallest) == {"block": "mlp", "rows": found["rows"]}
    assert re.search(r"case\((rows=.*, block='mlp'|block='mlp', rows=.*)\)", script(smallest, verdict))


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from . import mesh

    own = mesh.Training.end

    def off(self: mesh.Training, result: judges.Result) -> judges.Result:
        own(self, result)["weight head.bias"].mul_(1 + 1e-5)
        return result

    monkeypatch.setattr(mesh.Training, "end", off)
    assert judge(case()).kind == "wrong"
    assert judge(case(mode="captured")).why.startswith("weight head.bias")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("defect", DEFECTS)
def test_pairs_find_what_was_wrong_once(defect: str) -> None:
    refused = [made for row in REFUSED if row.always for made in refused_cases(row, "")]
    found = first_found(defect, [*refused, *PAIRS] if defect in OF_REFUSALS else PAIRS)
    assert found is not None


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "pipeline", "block": "tied", "layouts": "Partial"},
        {"mode": "pipeline", "block": "tied", "layouts": "Partial", "mesh": "cp=2", "storage": "offload"},
        {"mode": "pipeline", "head": "two weights added", "storage": "fsdp"},
        {"mode": "captured", "update": "Adagrad", "initial": "meta"},
        {"mode": "stages", "loss": "gradient penalty", "positions": "expanded"},
        {"mode": "pipeline", "loader": "shard_dataloader", "rows": "uneven", "micro": "2"},
        {
            "mode": "data-parallel",
            "micro": "2",
            "mesh": "tp=2",
            "layouts": "sequence",
            "head": "the first weight added",
        },
        {"mode": "pipeline", "micro": "2", "block": "tied", "rows": "one each", "second": "one"},
        {"mode": "data-parallel", "micro": "3", "mesh": "tp=3", "layouts": "found", "precision": "autocast"},
        {"context": "every layer checkpointed", "precision": "autocast", "storage": "fsdp", "mesh": "tp=2"},
        {
            "mode": "by hand, data-parallel",
            "rows": "one on the last",
            "inputs": "sequence first",
            "update": "AdamW, clipped",
            "head": "the first weight added",
        },
    ],
    ids=lambda values: ", ".join(values.values()),
)
def test_what_meetings_of_three_found(values: dict[str, str]) -> None:
    assert judge(case(**values)) == Verdict("equal")
