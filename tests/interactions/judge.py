"""What becomes of a case: compared with one device, refused as promised, or a finding, made smaller and printed."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass

from torch import Tensor

from meshwright.errors import ConversionError, DesyncError, MeshwrightError, RuleError

from . import device, mesh
from .factors import DEFAULTS, Case, case, short
from .limits import must_raise, refusal_of
from .program import Result

_DEFECTS = (RuleError, ConversionError, DesyncError)  # these say that Meshwright contradicts itself
TOLERANCES = {"float64": 1e-7, "autocast": 6e-2}
ROUNDINGS = 4  # times the rounding of one device
DIVERGED = 1e20  # where steps amplify so much, float32 overflows
BAD = ("wrong", "internal", "unpromised")


@dataclass(frozen=True)
class Verdict:
    """``equal``, ``refused`` (as the documents say), ``wrong``, ``internal``, ``unpromised`` or ``invalid``.

    Attributes:
        why: what differs, or the error.
    """

    kind: str
    why: str = ""

    @property
    def same(self) -> tuple[str, str]:
        """What a smaller case must have in common to be the same finding."""
        return self.kind, self.why.partition(":")[0] if self.kind != "wrong" else ""


def judge(made: Case) -> Verdict:
    """Run a case on one device and on its mesh."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = device.run(made)
        except Exception as error:
            return Verdict("invalid", f"one device: {type(error).__name__}: {error}")
        try:
            got = mesh.run(made)
        except MeshwrightError as error:
            row = refusal_of(made, error)
            if row is not None and (row.must or not isinstance(error, _DEFECTS)):
                return Verdict("refused", f"{row.page}: {row.promise}")
            kind = "internal" if isinstance(error, _DEFECTS) else "unpromised"
            return Verdict(kind, f"{type(error).__name__}: {_line(str(error))}")
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = next((f for f in reversed(frames) if "meshwright" in f.filename), frames[-1])
            at = f"{where.filename.rpartition('meshwright/')[2]}:{where.lineno}"
            return Verdict("internal", f"{type(error).__name__} at {at}: {_line(str(error))}")
    said = must_raise(made)
    return Verdict("wrong", f"no error: {said.says}") if said is not None else _compared(made, got, want)


def _line(text: str) -> str:
    return " ".join(text.split())[:600]


def _compared(made: Case, got: list[Result], want: list[Result]) -> Verdict:
    tolerance = TOLERANCES.get(made["precision"], 3e-4)
    exact: list[Result] | None = None
    for rank, mine in enumerate(got):
        place = rank if len(want) > 1 else 0
        for name, b in want[place].items():
            if name not in mine:
                return Verdict("wrong", f"{name}: missing on rank {rank}")
            a, size = mine[name], float(b.abs().max()) if b.numel() else 0.0
            if a.shape != b.shape:
                return Verdict("wrong", f"{name}: shape {tuple(a.shape)} on rank {rank}, one device {tuple(b.shape)}")
            off, allowed = _distance(a, b), tolerance * max(size, 1e-2)
            if size > DIVERGED and made["precision"] != "float64":
                continue
            if off > allowed and made["precision"] != "float64":
                # Some steps amplify rounding: then one device is as far from its own step in float64.
                exact = exact or device.run({**made, "precision": "float64"})
                alike = [n for n in want[place] if n.startswith("loss ")] if name.startswith("loss ") else [name]
                rounding = max(_distance(want[place][n], exact[place][n]) for n in alike)
                allowed = max(allowed, ROUNDINGS * rounding)
            if not off <= allowed:
                return Verdict("wrong", f"{name}: off by {off:.2g} of {size:.2g} on rank {rank}")
    return Verdict("equal")


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities and NaN differ by nothing."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(same, 0).max()) if a.numel() else 0.0


def shrink(made: Case, verdict: Verdict) -> tuple[Case, Verdict]:
    """With defaults in the place of values, one by one, as long as it fails in the same way."""
    changed = True
    while changed:
        changed = False
        for name in short(made):
            smaller = {**made, name: DEFAULTS[name]}
            found = judge(smaller)
            if found.same == verdict.same:
                made, verdict, changed = smaller, found, True
    return made, verdict


def script(made: Case, verdict: Verdict) -> str:
    """A program that shows a finding, for the root of a checkout."""
    values = ", ".join(f"{k}={v!r}" for k, v in short(made).items())
    return f"""\
# {verdict.kind}: {verdict.why}
from tests.interactions.factors import case
from tests.interactions.judge import judge

print(judge(case({values})))
"""


__all__ = ["BAD", "Verdict", "case", "judge", "script", "shrink"]
