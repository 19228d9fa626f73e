"""The framework of passes: names, options as text, order, errors before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import PassError
from meshwright.passes import Pass, PassManager, PassRecord, parse, register, registered
from meshwright.program import Plan, Program, build
from meshwright.program.ir.nodes import info_of
from meshwright.program.ir.subgraphs import copied


class Noted(Pass):
    """A pass that changes nothing but notes that it ran."""

    ran: ClassVar[list[str]] = []

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        Noted.ran.append(self.name)
        return program, PassRecord("looked")


@register
@dataclass(frozen=True)
class First(Noted):
    name = "test-first"
    before = ("test-second",)
    conflicts_with = ("test-enemy",)

    size: int | Literal["auto"] = "auto"
    share: float = 0.5
    quick: bool = True
    note: str = ""
    limit: int | None = None


@register
@dataclass(frozen=True)
class Second(Noted):
    name = "test-second"

    k: int


@register
@dataclass(frozen=True)
class Third(Noted):
    name = "test-third"
    after = ("test-second",)


@dataclass(frozen=True)
class Enemy(Noted):
    name = "test-enemy"


@dataclass(frozen=True)
class Round(Noted):
    name = "test-round"
    after = ("test-third",)
    before = ("test-second",)


@dataclass(frozen=True)
class Thirds(Noted):
    """Makes an update of three calls, by their sum, and cuts batches; a rank has neighbouring stages."""

    name = "test-thirds"
    calls_per_update, averages, splits = 3, False, 2  # type: ignore[assignment]

    def homes(self, ranks: int) -> tuple[int, ...]:
        return tuple(i // 2 for i in range(2 * ranks))


@dataclass(frozen=True)
class Breaks(Noted):
    """Leaves a reduction out."""

    name = "test-breaks"

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        made = copied(program)
        node = next(n for n in made.collectives() if info_of(n).sync)
        node.replace_all_uses_with(node.all_input_nodes[0])
        made.graph.erase_node(node)
        return made, PassRecord("broke it")


@dataclass(frozen=True)
class Refuses(Noted):
    name = "test-refuses"

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        raise PassError("there is no loop to unroll")


@pytest.fixture
def program() -> Program:
    mesh = mw.Mesh({"dp": 2})
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(batch={"dp": mw.Shard(0)})
    return build(model, lambda m, b: m(b).square().mean(), optimizer, torch.zeros(4, 4), mesh, plan).program


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("test-first", First()),
        ("test-first:size=4096,share=0.25,quick=no", First(4096, 0.25, False)),
        ("test-first:size=auto, note=a b,limit=none", First(note="a b")),
        ("test-first:limit=3,quick=TRUE", First(limit=3)),
        ("test-second:k=4", Second(4)),
    ],
)
def test_parse(text: str, made: Pass) -> None:
    assert parse(text) == made
    assert parse(str(made)) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("test-frist", "there is no pass 'test-frist'; did you mean 'test-first'?"),
        ("test-first:sise=3", "test-first has no option 'sise'; did you mean 'size'?"),
        ("test-first:size=big", "size='big': an integer or 'auto' was expected"),
        ("test-first:quick=maybe", "quick='maybe': true or false was expected"),
        ("test-first:share=", "share='': a number was expected"),
        ("test-first:limit=x", "an integer or none was expected"),
        ("test-first:size", "option=value was expected, not 'size'"),
        ("test-first:size=1,size=2", "size is given twice"),
        ("test-second", "test-second needs k: write test-second:k=..."),
        ("gradient-merge:k_steps=0", "k_steps"),
        ("data-parallel-optimization:bucket_bytes=0", "bucket_bytes=0"),
        ("data-parallel-optimization:alpha_us=-1", "alpha_us=-1.0: a number above 0"),
    ],
)
def test_parse_errors(text: str, says: str) -> None:
    with pytest.raises(PassError) as error:
        parse(text)
    assert says in str(error.value)


def test_the_passes_that_come_with_it_are_registered() -> None:
    assert {"data-parallel-optimization", "gradient-merge"} <= set(registered())


def broken_classes() -> list[tuple[Callable[[], Any], str]]:
    class Thawed(Noted):
        name = "test-thawed"

    @dataclass(frozen=True)
    class Shouting(Noted):
        name = "TestShouting"

    @dataclass(frozen=True)
    class Idle(Pass):
        name = "test-idle"

    @dataclass(frozen=True)
    class Other(Noted):
        name = "test-first"

    return [
        (lambda: register(Thawed), "must be a frozen dataclass"),
        (lambda: register(Shouting), "a kebab-case name like 'my-pass' was expected"),
        (lambda: register(Idle), "Idle has no apply(program)"),
        (lambda: register(Other), "two passes are called 'test-first'"),
        (lambda: register(int), "is no pass"),  # type: ignore[type-var]
        (lambda: PassManager([Second]), "Second is a class: give a pass with its options, Second(...)"),  # type: ignore[list-item]
        (lambda: PassManager([3]), "is no pass"),  # type: ignore[list-item]
        (lambda: PassManager(["test-first", First(3)]), "test-first is listed 2 times"),
        (lambda: PassManager([Enemy(), First()]), "test-first and test-enemy cannot be used together"),
        (lambda: PassManager([Second(1), First()], keep_order=True), "test-second is listed before test-first"),
        (lambda: PassManager([Third(), Second(1), Round()]), "no order of these passes is allowed"),
    ]


@pytest.mark.parametrize(("make", "says"), broken_classes(), ids=lambda x: x if isinstance(x, str) else "")
def test_mistakes_are_errors_before_anything_runs(make: Callable[[], Any], says: str) -> None:
    Noted.ran.clear()
    with pytest.raises(PassError) as error:
        make()
    assert says in str(error.value)
    assert not Noted.ran


def test_declared_constraints_decide_the_order_then_the_list(program: Program) -> None:
    Noted.ran.clear()
    PassManager([Third(), Enemy(), "test-second:k=1"])(program)
    assert Noted.ran == ["test-enemy", "test-second", "test-third"]
    assert [p.name for p in PassManager([Second(2), First(), Third()]).passes] == [
        "test-first",
        "test-second",
        "test-third",
    ]
    kept = PassManager([First(), Second(2)], keep_order=True)
    assert [p.name for p in kept.passes] == ["test-first", "test-second"]


@pytest.mark.parametrize("word", ["true", "yes", "1", "false", "no", "0", "Yes", "NO"])
def test_words_of_options(word: str) -> None:
    assert parse(f"test-first:quick={word}") == First(quick=word.lower() in ("true", "yes", "1"))


def test_what_passes_say_together() -> None:
    none, plain, all_ = PassManager([]), PassManager([First()]), PassManager([Second(1), Thirds()])
    for manager in (none, plain):
        assert (manager.calls_per_update, manager.averages, manager.splits) == (1, True, 1)
        assert manager.homes(3) == (0, 1, 2)
    assert (all_.calls_per_update, all_.averages, all_.splits) == (3, False, 2)
    assert all_.homes(2) == (0, 0, 1, 1)


def test_a_record_without_more() -> None:
    plain = PassRecord("looked")
    assert str(plain) == ": looked [0 ms]"
    assert (plain.name, plain.options, plain.lines, plain.details) == ("", "", (), {})
    assert (plain.nodes, plain.kinds, plain.seconds, plain.verify_seconds) == ((0, 0), ({}, {}), 0.0, 0.0)
    full = PassRecord("looked", ("at a", "at b"), name="test-first", options="size=1", seconds=0.0125)
    assert str(full) == "test-first(size=1): looked [12 ms]\n  at a\n  at b"


def test_records_and_the_callback(program: Program) -> None:
    seen: list[tuple[str, bool]] = []
    manager = PassManager(
        ["data-parallel-optimization:bucket_bytes=1024", Second(2)],
        after_each=lambda record, before, after: seen.append((record.name, str(before) == str(after))),
    )
    made, (first, second) = manager.run(program)
    assert seen == [("data-parallel-optimization", False), ("test-second", True)]
    assert first.kinds[0]["all_reduce"] == first.kinds[1]["all_reduce"] + 1
    assert first.nodes == (len(program.graph.nodes), len(made.graph.nodes))
    assert first.seconds > 0
    assert first.verify_seconds > 0
    assert second.options == "k=2"
    assert "2 reductions of gradients became 1" in str(first)


def test_records_stay_on_the_step_and_are_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = mw.Mesh({"dp": 2})

    def rank() -> Any:
        model = nn.Linear(4, 2)
        step = mw.compile_step(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 4), mesh=mesh,
            batch={"dp": mw.Shard(0)}, passes=["data-parallel-optimization", "gradient-merge:k_steps=2"],
        )  # fmt: skip
        return step.passes, step.explain(), step.program

    with caplog.at_level("INFO", logger="meshwright.passes"):
        (records, why, program), _ = mw.simulate(rank, mesh)
    assert [r.name for r in records] == ["gradient-merge", "data-parallel-optimization"]
    assert why.notes[:2] == tuple(f"{r.name}: {r.summary}" for r in records)
    assert all(r.summary in why.text(width=400) for r in records)
    assert [r.getMessage() for r in caplog.records] == [str(r) for r in records]  # of the first rank
    mw.save_program(program, tmp_path / "program")
    assert mw.load_program(tmp_path / "program").passes == tuple(str(r) for r in records)


def test_the_given_program_stays_as_it_is(program: Program) -> None:
    before, fused, merged = str(program), "data-parallel-optimization", "gradient-merge:k_steps=2,weighted=false"
    for passes in ([fused], [merged], [fused, merged]):
        assert str(PassManager(passes)(program)) != before
        assert str(program) == before


def test_a_pass_that_cannot_apply_is_named(program: Program) -> None:
    with pytest.raises(PassError, match="test-refuses: there is no loop to unroll"):
        PassManager([Refuses()])(program)
    with pytest.raises(PassError, match="test-refuses: there is no loop to unroll"):
        PassManager([First(), Refuses(), Third()])(program)


def test_what_a_pass_leaves_is_verified(program: Program) -> None:
    with pytest.raises(PassError, match=r"test-breaks left a program that is not well formed: .*not summed over dp"):
        PassManager([Breaks()])(program)


def test_a_program_that_is_broken_before_any_pass(program: Program) -> None:
    wrong = replace(program, inputs=program.inputs[1:])
    with pytest.raises(PassError, match="not well formed before any pass"):
        PassManager([Enemy()])(wrong)


def test_compile_step_says_so_before_capture() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("captured")

    model = nn.Linear(2, 2)
    for passes in (["no-such-pass"], [Second(1), Second(2)]):
        with pytest.raises(PassError):
            mw.compile_step(model, never, None, torch.zeros(2, 2), mesh=mw.Mesh({"dp": 1}), passes=passes)
