"""The functions of a written step: names of values, repeated blocks, the lines in their order."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from ... import compat
from ..ir.nodes import info_of, is_mutating
from .repeats import Repeat, Slot, repeats_of
from .statements import HOLE, Statement, gradient_in_bucket, is_bucket
from .transposes import without_transposes

_WIDTH = 116
_NUMBER = re.compile(r"\d+")
_RETURNS = {  # of ops whose schemas have no names for their values
    "native_layer_norm": ("out", "mean", "rstd"),
    "native_batch_norm": ("out", "mean", "rstd"),
    "native_group_norm": ("out", "mean", "rstd"),
    "native_layer_norm_backward": ("d_input", "d_weight", "d_bias"),
    "native_batch_norm_backward": ("d_input", "d_weight", "d_bias"),
    "convolution_backward": ("d_input", "d_weight", "d_bias"),
    "max_pool2d_with_indices": ("out", "indices"),
}
_STRING = re.compile(r"""\"(?:[^"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'""")
_SPACE = "\x02"  # of a space where no line may end


@dataclass
class ValueNames:
    """ValueNames of values, each once; readable where the program says what a value is."""

    reserved: set[str]
    texts: dict[fx.Node, str] = field(default_factory=dict)
    named_after: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a matrix, after a gradient that it is
    _used: Counter[str] = field(default_factory=Counter)

    def of(self, node: fx.Node) -> str:
        """The name of a value."""
        found = self.texts.get(node)
        if found is None:
            found = self.texts[node] = self.fresh(_base(self.named_after.get(node, node)))
        return found

    def fresh(self, base: str) -> str:
        """A name that nothing else has."""
        base = re.sub(r"\W+", "_", base).strip("_").lower() or "x"
        base = f"v{base}" if base[0].isdigit() else base
        while True:
            n = self._used[base]
            self._used[base] += 1
            name = f"{base}_{n}" if n else base
            if name not in self.reserved and not keyword.iskeyword(name) and not hasattr(builtins, name):
                self.reserved.add(name)
                return name


def _base(node: fx.Node) -> str:
    info = info_of(node)
    if (gradient := gradient_in_bucket(node)) is not None:
        return "place_of_" + _base(gradient)
    if is_bucket(node):
        return "grad_bucket"
    short = re.sub(r"_default.*|_tensor.*|_int.*|_dim.*|_\d+$", "", node.name) or node.name
    if ", " in info.sync:  # several gradients, reduced together
        return "grad_bucket"
    if info.sync:
        return "grad_" + _last(info.sync)
    if info.grad_of:
        return "local_grad_" + _last(info.grad_of[0][0])
    if info.gather:
        return "full_" + _last(info.gather)
    if info.role == "forward" and info.spec is not None and info.source:
        return info.source
    if node.target is operator.getitem and not (info.gradient_at and "getitem" not in info.gradient_at[0][0]):
        return _of_several(node) or ("d_" + info.gradient_at[0][0] if info.gradient_at else short)
    return "d_" + info.gradient_at[0][0] if info.gradient_at else short


def _of_several(node: fx.Node) -> str:
    """The name of one of the values of an op, where the op has names for them."""
    op, i = node.args
    target: Any = op.target if isinstance(op, fx.Node) else None
    if not isinstance(target, compat.OpOverload) or not isinstance(i, int):
        return ""
    returns = target._schema.returns
    names = _RETURNS.get(target._schema.name.partition("::")[2], tuple(r.name or "" for r in returns))
    return names[i] if i < len(names) else ""


def _last(name: str) -> str:
    return "_".join(name.split(".")[-2:])


@dataclass
class Pack:
    """Values that a block leaves for one other block: a tuple."""

    maker: Repeat
    lines: list[int]  # of the maker's block
    reader: Repeat
    iterations: tuple[int, ...]  # of the reader, for each of the maker
    names: list[str] = field(default_factory=list)


@dataclass
class RepeatedBlock:
    """A repeat as a function."""

    repeat: Repeat
    name: str
    numbers: list[int]  # that stand for the block, one for each iteration; empty: its parameters have no number
    texts: dict[int, str]  # of a slot, what it is inside
    arguments: list[int]  # slots that are parameters
    outputs: list[int]  # lines of values that others read one by one
    packs: list[Pack]  # that it makes
    opens: list[tuple[Pack, list[str]]]  # that it reads, with the names inside


class Function:
    """One program as Python functions.

    Args:
        statements: Its lines, in order.
        inputs: Node of an input to the key of its tensor; nodes of a batch are named by `names`.
        results: The values that are returned.
    """

    def __init__(
        self,
        statements: Sequence[Statement],
        inputs: Mapping[fx.Node, str],
        results: Sequence[fx.Node],
        names: ValueNames,
    ) -> None:
        statements, named = without_transposes(statements, results)
        names.named_after.update(named)
        self.statements, self.inputs, self.names = statements, inputs, names
        self.results = set(results)
        self.places = {s.node: i for i, s in enumerate(statements)}
        self.repeats = repeats_of(statements)
        self.readers: dict[fx.Node, list[int]] = {}
        for i, s in enumerate(statements):
            for ref in dict.fromkeys(s.reads):
                self.readers.setdefault(ref, []).append(i)
        self.home = {i: r for r, one in enumerate(self.repeats) for i in range(one.start, one.end)}
        packs = [p for r in self.repeats for p in self._packs(r)]
        self.blocks = [self._block(r, packs) for r in self.repeats]

    # -- analysis ---------------------------------------------------------------------------------------

    def _outside(self, r: Repeat, k: int, line: int) -> list[int] | None:
        """The statements outside of its block that read a value; None for a result."""
        node = self.statements[r.at(k, line)].node
        if node in self.results:
            return None
        low = r.at(k, 0)
        return [i for i in self.readers.get(node, ()) if not low <= i < low + r.period]

    def _packs(self, r: Repeat) -> Iterator[Pack]:
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for line in range(r.period):
            where: list[tuple[int, int]] | None = []
            for k in range(r.count):
                readers = self._outside(r, k, line)
                homes = {self._place_of(i) for i in readers or ()}
                one = next(iter(homes)) if readers and len(homes) == 1 else None
                if one is None or one[0] < 0 or self.repeats[one[0]] is r or where is None:
                    where = None
                    break
                where.append(one)
            if where and len({h for h, _ in where}) == 1 and len({k for _, k in where}) == len(where):
                groups.setdefault((where[0][0], tuple(k for _, k in where)), []).append(line)
        for (home, iterations), lines in groups.items():
            reader = self.repeats[home]
            if reader.count == r.count and len(lines) > 1:
                kept = [line for line in lines if self._slot_of(r, line, reader, iterations) is not None]
                if len(kept) > 1:
                    yield Pack(r, kept, reader, iterations)

    def _place_of(self, i: int) -> tuple[int, int]:
        """(repeat, iteration) of a statement; (-1, 0) outside of them."""
        home = self.home.get(i, -1)
        return (home, 0) if home < 0 else (home, (i - self.repeats[home].start) // self.repeats[home].period)

    def _slot_of(self, maker: Repeat, line: int, reader: Repeat, iterations: tuple[int, ...]) -> Slot | None:
        wanted: list[fx.Node | None] = [None] * reader.count
        for k, m in enumerate(iterations):
            wanted[m] = self.statements[maker.at(k, line)].node
        return next((s for s in reader.slots if list(s.nodes) == wanted), None)

    def _block(self, r: Repeat, packs: Sequence[Pack]) -> RepeatedBlock:
        first = self.statements[r.start]
        stem = _NUMBER.split(first.section)[0].split(" ")[0].strip("._ ,") or "block"
        role = first.section.rpartition(", ")[2]
        numbers: list[int] = []
        texts: dict[int, str] = {}
        arguments: list[int] = []
        mine = [p for p in packs if p.maker is r]
        opens: list[tuple[Pack, list[str]]] = []
        taken: dict[int, str] = {}
        used: set[str] = set()
        for pack in (p for p in packs if p.reader is r):
            inner = []
            for line in pack.lines:
                slot = self._slot_of(pack.maker, line, r, pack.iterations)
                assert slot is not None
                inner.append(self._inside(self.statements[pack.maker.at(0, line)].node, used))
                taken[id(slot)] = inner[-1]
            opens.append((pack, inner))
        for i, slot in enumerate(r.slots):
            if id(slot) in taken:
                texts[i] = taken[id(slot)]
            else:
                texts[i] = self._shared(slot, numbers) or ""
                if not texts[i]:
                    arguments.append(i)
                    texts[i] = self._inside(slot.nodes[0], used)
        packed = {line for p in mine for line in p.lines}
        outputs = [
            line for line in range(r.period)
            if line not in packed and any(self._outside(r, k, line) != [] for k in range(r.count))
        ]  # fmt: skip
        name = self.names.fresh(f"{stem}_{role}" if role and role not in stem else stem)
        return RepeatedBlock(r, name, numbers, texts, arguments, outputs, mine, opens)

    def _inside(self, node: fx.Node, used: set[str]) -> str:
        """The name inside of a block of what is another value in each, of which the first block has ``node``."""
        name = self.names.fresh("tensor") if node in self.inputs else self.names.of(node)
        if name in used:  # the first block has one value in two places
            name = self.names.fresh(name)
        used.add(name)
        return name

    def _shared(self, slot: Slot, numbers: list[int]) -> str | None:
        """What a slot is called inside where it needs no parameter: an input of the step."""
        keys = [self.inputs.get(n) for n in slot.nodes]
        if None in keys:
            return None
        names = [str(k) for k in keys]
        if len(set(names)) == 1:
            return f"w[{_quoted(names[0])}]"
        split = [_NUMBER.split(n) for n in names]
        fields = [[int(x) for x in _NUMBER.findall(n)] for n in names]
        if any(s != split[0] for s in split):
            return None
        varying = [i for i in range(len(fields[0])) if len({f[i] for f in fields}) > 1]
        values = [f[varying[0]] for f in fields]
        if len(varying) != 1 or any(str(v) not in n for v, n in zip(values, names, strict=True)):
            return None
        if not numbers:
            numbers += values
        shift = values[0] - numbers[0]
        if [v - n for v, n in zip(values, numbers, strict=True)] != [shift] * len(values):
            return None
        i = "i" if not shift else f"i {'+' if shift > 0 else '-'} {abs(shift)}"
        parts = [split[0][0]]
        for at, number in enumerate(fields[0]):
            parts += [f"{{{i}}}" if at == varying[0] else str(number), split[0][at + 1]]
        return f'w[f"{"".join(parts)}"]'

    # -- lines ------------------------------------------------------------------------------------------

    def text(self, node: fx.Node) -> str:
        """A value outside of blocks."""
        key = self.inputs.get(node)
        return self.names.of(node) if key is None else f"w[{_quoted(key)}]"

    def definitions(self) -> Iterator[tuple[str, list[str]]]:
        """The functions of repeated blocks: name and lines."""
        for block in self.blocks:
            yield block.name, list(self._definition(block))

    def _definition(self, block: RepeatedBlock) -> Iterator[str]:
        r = block.repeat
        inner: dict[tuple[int, int], str] = {}
        for i, slot in enumerate(r.slots):
            inner.update(dict.fromkeys(slot.places, block.texts[i]))
        parameters = [*(["i"] if block.numbers else []), *(block.texts[i] for i in block.arguments)]
        parameters += [f"saved_{n}" if n else "saved" for n in range(len(block.opens))]
        yield from wrapped(f"def {block.name}(", ", ".join(["w", *parameters]), "):")
        sections = [self.statements[r.at(0, line)].section for line in range(r.period)]
        yield f'    """{r.count} times: {_module(sections)}."""'
        for n, (_, names) in enumerate(block.opens):
            yield from wrapped("    (", ", ".join(names) + ",", f") = saved{f'_{n}' if n else ''}")
        section = ""
        for line in range(r.period):
            s = self.statements[r.at(0, line)]
            here = _NUMBER.sub("i", s.section, count=1)
            if here != section:
                section = here
                yield f"    # {section}"
            texts = [inner.get((line, k)) or self.names.of(ref) for k, ref in enumerate(s.reads)]
            differs = s.reason != self.statements[r.at(1, line)].reason  # by the number of the block
            yield from self._line(s, texts, "    ", re.sub(r"\.\d+\b", ".i", s.reason, count=1) if differs else "")
        out = [self.names.of(self.statements[r.at(0, line)].node) for line in block.outputs]
        for pack in block.packs:
            out.append(f"({', '.join(self.names.of(self.statements[r.at(0, line)].node) for line in pack.lines)},)")
        yield from wrapped("    return ", ", ".join(out) if len(out) != 1 else out[0].strip("()"), "")

    def body(self) -> Iterator[str]:
        """The lines of the step."""
        last = self._last_uses()
        section, i, dead = "", 0, range(0)
        starts = {b.repeat.start: b for b in self.blocks}
        while i < len(self.statements):
            block = starts.get(i)
            if block is not None:
                yield from self._deleted(last, range(dead.start, i))
                section, dead = "", range(block.repeat.end, 0)
                yield f"    # {_NUMBER.split(self.statements[i].section)[0].strip('. ')}, {block.repeat.count} times"
                for k in range(block.repeat.count):
                    yield from self._call(block, k)
                    yield from self._deleted(last, range(block.repeat.at(k, 0), block.repeat.at(k + 1, 0)))
                i = block.repeat.end
                continue
            s = self.statements[i]
            if s.section != section:
                yield from self._deleted(last, range(dead.start, i))
                section, dead = s.section, range(i, 0)
                yield f"    # {section}"
            yield from self._line(s, [self.text(ref) for ref in s.reads], "    ")
            i += 1

    def _line(self, s: Statement, texts: Sequence[str], indent: str, reason: str = "") -> Iterator[str]:
        parts = s.code.split(HOLE)
        code = "".join(a + b for a, b in zip(parts, [*texts, ""], strict=True))
        line = info_of(gradient_in_bucket(s.node) or s.node).line
        comment = "  # " + "; ".join(filter(None, (line, s.comment)))
        if reason or s.reason:
            yield f"{indent}# {reason or s.reason}"
        target = f"{self.names.of(s.node)} = " if self.readers.get(s.node) or s.node in self.results else ""
        if not target and is_mutating(s.node):
            comment = ""
        made = list(wrapped(indent + target + code.partition("(")[0] + "(", code.partition("(")[2][:-1], ")")) \
            if code.endswith(")") and len(code) > _WIDTH else [indent + target + code]  # fmt: skip
        made[-1] += comment if comment != "  # " else ""
        yield from made

    def _call(self, block: RepeatedBlock, k: int) -> Iterator[str]:
        r = block.repeat
        arguments = ["w", *([str(block.numbers[k])] if block.numbers else [])]
        arguments += [self.text(r.slots[i].nodes[k]) for i in block.arguments]
        for pack, _ in block.opens:
            arguments.append(pack.names[pack.iterations.index(k)])
        out = []
        for line in block.outputs:
            node = self.statements[r.at(k, line)].node
            unread = node not in self.results and not self._outside(r, k, line)
            out.append("_" if unread else self.names.of(node))
        for pack in block.packs:
            pack.names.append(self.names.fresh("saved"))
            out.append(pack.names[-1])
        target, inner = f"    {', '.join(out)} = " if out else "    ", ", ".join(arguments)
        if len(out) > 1 and len(target) + len(block.name) + len(inner) + 2 > _WIDTH:
            yield from list(wrapped("    (", ", ".join(out) + ",", "", always=True))[:-1]
            target = "    ) = "
        # One value has no parentheses: ``(x,) = f()`` would take apart a tensor of one row.
        yield from wrapped(f"{target}{block.name}(", inner, ")")

    def _last_uses(self) -> dict[int, list[str]]:
        """Statement to the values outside of blocks that nobody reads after it."""
        found: dict[int, list[str]] = {}
        hidden = {self.statements[b.repeat.at(k, line)].node for b in self.blocks for k in range(b.repeat.count)
                  for line in range(b.repeat.period) if line not in b.outputs}  # fmt: skip
        for node, readers in self.readers.items():
            if node in self.results or node in self.inputs or node in hidden or node not in self.places:
                continue
            inside = self._place_of(self.places[node])
            if inside[0] >= 0 and self._place_of(max(readers)) == inside:
                continue
            found.setdefault(max(readers), []).append(self.names.of(node))
        for b in self.blocks:
            for pack in b.packs:
                for k, m in enumerate(pack.iterations):
                    end = pack.reader.at(m, pack.reader.period - 1)
                    found.setdefault(end, []).append(f"\x01{id(pack)}:{k}")
        return found

    def _deleted(self, last: Mapping[int, list[str]], span: range) -> Iterator[str]:
        packs = {id(p): p for b in self.blocks for p in b.packs}
        dead = []
        for i in span:
            for name in last.get(i, ()):
                if name.startswith("\x01"):
                    pack, _, k = name[1:].partition(":")
                    name = packs[int(pack)].names[int(k)]
                dead.append(name)
        if dead:
            yield from wrapped("    del ", ", ".join(dead), "")


def _quoted(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text else f'"{text}"'


def _module(sections: Sequence[str]) -> str:
    """The module that has all of a block, and its part of the step: ``blocks.i, forward``."""
    paths = [_NUMBER.sub("i", s.partition(", ")[0].partition(" ")[0], count=1).split(".") for s in sections]
    shared = [names[0] for names in zip(*paths, strict=False) if len(set(names)) == 1]
    roles = dict.fromkeys(s.rpartition(", ")[2] for s in sections)
    return ", ".join([".".join(shared) or "block", *roles])


def wrapped(head: str, inner: str, tail: str, always: bool = False) -> Iterator[str]:
    """A line, or several where it is long: broken at commas inside of brackets."""
    if len(head) + len(inner) + len(tail) <= _WIDTH and not always:
        yield head + inner + tail
        return
    opening = "" if head.rstrip().endswith(("(", "[", "{")) else "("
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    yield head + opening
    # Lines end after commas outside of strings: keys of tensors may have spaces.
    fixed = _STRING.sub(lambda m: m.group().replace(" ", _SPACE), inner)
    fixed = re.sub(r"(?<!,) ", _SPACE, fixed)
    for line in textwrap.wrap(
        fixed, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ):
        yield line.replace(_SPACE, " ")
    yield indent[4:] + (")" if opening else "") + tail


__all__ = ["Function", "ValueNames", "wrapped"]
