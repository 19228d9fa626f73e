"""One rank: it makes the samples of an op, and runs a case when it is told to."""

from __future__ import annotations

import contextlib
import random
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils._pytree import tree_leaves, tree_map

from .cases import MESHES, UNDEFINED, Case, Sample, layouts, samples, set_sizes
from .contenders import CONTENDERS, Contender

RANKS = 4
# Ops that draw are known by drawing otherwise from other seeds; op_db gives dropout the same one at each call.
vars(invocations)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)


@dataclass(frozen=True)
class Settings:
    """What a run is asked for.

    Attributes:
        sizes: ``"even"`` or ``"uneven"``.
        dtype: name of the dtype that the ops are run in.
        samples: of each op.
        layouts: of each sample on a row of ranks; half as many on two by two.
        contenders: names.
        traffic: whether bytes are counted.
        seconds: that one case may take.
    """

    sizes: str = "uneven"
    dtype: str = "float32"
    samples: int = 4
    layouts: int = 4
    contenders: tuple[str, ...] = ("meshwright",)
    traffic: bool = False
    seconds: float = 20.0


@dataclass(frozen=True)
class Answer:
    """What one rank says of a case.

    Attributes:
        kind: ``"pass"``, ``"random"``, ``"wrong_value"``, ``"wrong_gradient"``, ``"missing"``, ``"error"``...
        message: why.
        sent: bytes that the op and its backward sent.
        settled: the same, with sums that the op left open and with gradients brought to where their leaves lie.
    """

    kind: str
    message: str = ""
    sent: float = 0.0
    settled: float = 0.0


class OutOfTimeError(BaseException):
    """The alarm clock rang; not an Exception, which a library might catch."""


EXACT = False  # whether inputs have double precision


def seed(number: int) -> None:
    """Seeds what samples and random ops draw from."""
    torch.manual_seed(number)
    random.seed(number)


def difference(got: Any, want: Any, loose: float = 1.0) -> str:
    """How two results differ; empty where they do not."""
    if not isinstance(want, torch.Tensor):
        same = got == want or repr(got) == repr(want)  # nan
        if isinstance(want, float) and isinstance(got, float):
            same = same or abs(got - want) <= 1e-3 * max(1.0, abs(want))
        return "" if same else f"{got!r} for {want!r}"[:100]
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__} for a tensor"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
    got, want = (t.detach().resolve_conj().resolve_neg() for t in (got, want))
    got, want = (t if t.layout is torch.strided else t.to_dense() for t in (got, want))
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(got, want) else "other integers or booleans"
    rel = 1e-8 if EXACT and want.dtype in (torch.float64, torch.complex128) else 1e-3
    finite = want[torch.isfinite(want)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    if torch.allclose(got, want, rtol=loose * rel, atol=loose * rel * scale / 10, equal_nan=True):
        return ""
    return f"off by {float(torch.nan_to_num(got - want).abs().max()):.3g} of {scale:.3g}"


class Reference:
    """One device's results of a sample: values, and gradients where the op has them."""

    def __init__(self, op: Any, sample: Sample) -> None:
        self.op, self.sample = op, sample
        self.grad = any(t.requires_grad for t in sample.tensors)
        leaves, out = self._run(1, self.grad)
        self.values = [x.detach() if isinstance(x, torch.Tensor) else x for x in tree_leaves(out)]
        self.drawn = op.name in UNDEFINED or any(
            difference(a, b)
            for n in (2, 3)
            for a, b in zip(tree_leaves(self._run(n, False)[1]), self.values, strict=True)
        )
        self.wanted: list[int] = []
        self.cotangents: list[torch.Tensor] = []
        self.grads: tuple[torch.Tensor | None, ...] | None = None
        if self.grad and not self.drawn:
            self._differentiate(leaves, tree_leaves(sample.finish(out)))

    def _run(self, number: int, grad: bool) -> tuple[list[torch.Tensor], Any]:
        leaves = [t.detach().clone().requires_grad_(grad and t.requires_grad) for t in self.sample.tensors]
        args, kwargs = self.sample.call(leaves)
        seed(number)
        return leaves, self.op.op(*args, **kwargs)

    def _differs(self, number: int) -> bool:
        again = tree_leaves(self._run(number, False)[1])
        return any(difference(a, b) for a, b in zip(again, self.values, strict=True))

    def _differentiate(self, leaves: list[torch.Tensor], out: list[Any]) -> None:
        self.wanted = [i for i, x in enumerate(out) if isinstance(x, torch.Tensor) and x.requires_grad]
        draw = torch.Generator().manual_seed(7)
        for i in self.wanted:
            x = out[i]
            made = torch.rand(x.shape, generator=draw) + 0.5
            if x.is_complex():
                made = torch.complex(made, torch.rand(x.shape, generator=draw))
            self.cotangents.append(made.to(x.dtype))
        if self.wanted:
            given = [t for t in leaves if t.requires_grad]
            self.grads = torch.autograd.grad([out[i] for i in self.wanted], given, self.cotangents, allow_unused=True)

    def judge(self, library: Contender, mesh: Any, case: Case, sent: Callable[[], float]) -> Answer:
        """Runs the sample in these layouts.  Raises what the library raises.

        Bytes of showing the results whole are not counted.
        """
        leaves = [
            library.distribute(t, mesh, p, self.grad and t.requires_grad)
            for t, p in zip(self.sample.tensors, case.places, strict=True)
        ]
        args, kwargs = self.sample.call(leaves)
        seed(1)
        out = self.op.op(*args, **kwargs)
        spent = sent()
        out = tree_map(lambda x: library.summed(x) if library.owns(x) else x, out)
        settled = sent()
        full = tree_map(lambda x: library.full(x) if library.owns(x) else x, out)
        shown = sent()
        got = tree_leaves(full)
        if len(got) != len(self.values):
            return Answer("wrong_value", f"{len(got)} results for {len(self.values)}")
        if self.drawn:
            shapes = [[getattr(x, "shape", None) for x in xs] for xs in (got, self.values)]
            return Answer("random") if shapes[0] == shapes[1] else Answer("wrong_value", "another shape")
        for i, (a, b) in enumerate(zip(got, self.values, strict=True)):
            if found := difference(a, b):
                return Answer("wrong_value", f"result {i}: {found}")
        if self.grads is None:
            return Answer("pass", "", spent, settled)
        flat = tree_leaves(self.sample.finish(full))
        given = [t for t in leaves if t.requires_grad]
        cotangents = [c.clone() for c in self.cotangents]
        made = torch.autograd.grad([flat[i] for i in self.wanted], given, cotangents, allow_unused=True)
        backward = sent()
        there = [library.like(g, t) if library.owns(g) else g for g, t in zip(made, given, strict=True)]
        answer = Answer("pass", "", spent + backward - shown, settled + sent() - shown)
        for i, (g, b) in enumerate(zip(there, self.grads, strict=True)):
            a = library.full(g) if library.owns(g) else g
            known = b if a is None else a
            if known is None:
                continue
            want, whole = (torch.zeros_like(known) if x is None else x for x in (b, a))
            if found := difference(whole, want, loose=5.0):
                return Answer("wrong_gradient", f"of argument {i}: {found}")
        return answer


def _answer(reference: Reference, library: Contender, mesh: Any, case: Case, settings: Settings) -> Answer:
    signal.setitimer(signal.ITIMER_REAL, settings.seconds)
    try:
        with library.traffic() if settings.traffic else contextlib.nullcontext(lambda: 0.0) as sent:
            return reference.judge(library, mesh, case, sent)
    except OutOfTimeError:
        return Answer("timeout")
    except Exception as error:
        kind = "missing" if library.missing(error) else "error"
        message = f"{type(error).__name__}: {error}"[:240]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Answer(kind, message)


def _references(number: int, settings: Settings) -> list[Reference | str]:
    """Of each sample; a text where one device refuses it as well."""
    made: list[Reference | str] = []
    try:
        found = samples(invocations.op_db[number], getattr(torch, settings.dtype), settings.samples, 1000 + number)
    except Exception as error:
        return [f"no samples: {error}"[:200]]
    for sample in found:
        try:
            made.append(Reference(invocations.op_db[number], sample))
        except Exception as error:
            made.append(f"one device: {error}"[:200])
    return made


def cases_of(number: int, references: Sequence[Reference | str], settings: Settings) -> list[Case]:
    """All cases of an op, the same on every rank."""
    return [
        case
        for i, r in enumerate(references)
        if isinstance(r, Reference)
        for case in layouts(r.sample.tensors, i, settings.layouts, f"{number}-{i}")
    ]


def rank(me: int, init: str, line: Connection, settings: Settings) -> None:
    """The life of one process: ``("op", number)`` and ``("case", k, contender)`` come, cases and answers go."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    global EXACT
    EXACT = settings.dtype in ("float64", "complex128")
    set_sizes(settings.sizes)
    dist.init_process_group(
        "gloo", init_method=f"file://{init}", rank=me, world_size=RANKS, timeout=timedelta(seconds=settings.seconds)
    )

    def rings(*_: Any) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, rings)
    made = {name: CONTENDERS[name]() for name in settings.contenders}
    meshes = {(name, shape): library.mesh(shape) for name, library in made.items() for shape in MESHES}
    references: list[Reference | str] = []
    cases: list[Case] = []
    while True:
        kind, *given = line.recv()
        if kind == "op":
            references = _references(given[0], settings)
            cases = cases_of(given[0], references, settings)
            line.send(cases)
        else:
            case, name = cases[given[0]], given[1]
            reference = references[case.sample]
            assert isinstance(reference, Reference)
            line.send(_answer(reference, made[name], meshes[name, case.mesh], case, settings))


__all__ = ["RANKS", "Answer", "Settings", "rank"]
