"""What a verification found, covered and left out: as text, as data, and as a file that a later run is held against."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import VerifyError
from ..program.step import CompiledStep
from .journal import Departure


@dataclass(frozen=True)
class Coverage:
    """What was compared in one mode.

    Attributes:
        mode: ``"eager"`` or ``"captured"``.
        values: how many values of the ranks were compared, by kind: ``"forward"``, ``"backward"``, ``"grad"``...
        missed: lines of the user's code where one device computed values of which ranks told none, with the ops.
    """

    mode: str
    values: Mapping[str, int]
    missed: tuple[str, ...] = ()

    def __str__(self) -> str:
        counted = ", ".join(f"{n} {_WORDS.get(kind, kind)}" for kind, n in self.values.items())
        return f"{self.mode}: compared {counted}"


_WORDS = {
    "forward": "values of the forward", "backward": "gradients of values", "loss": "losses",
    "grad": "gradients of parameters", "clipped": "clipped gradients", "stepped": "gradients after the update",
    "param": "parameters", "state": "states",
    "buffer": "buffers", "random": "states of the random generator", "loaded": "values after the load",
}  # fmt: skip


@dataclass(frozen=True)
class Verification:
    """What :func:`meshwright.verify` found.

    Attributes:
        title: what was verified, and where.
        departures: of each mode the first value that departs from one device; none where all is right.
        covered: what was compared.
        notes: what was left out, axes that no layout uses.
        digest: of the program and the layouts of the sizes and dtypes that were given, which the run on a cluster is to
            have too; empty where nothing was captured.
        seconds: that it took.
        taken: sizes that were taken down, in words; none where what was given was verified.
    """

    title: str
    departures: tuple[Departure, ...]
    covered: tuple[Coverage, ...]
    notes: tuple[str, ...]
    digest: str
    seconds: float
    taken: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing departs."""
        return not self.departures

    def check(self, step: CompiledStep) -> None:
        """Whether a captured step, on a cluster say, is the one that was verified.

        Raises:
            VerifyError: it is another program, or lies otherwise.
        """
        if not step.digest or not self.digest:
            raise VerifyError("steps by hand and eager ones have no digest: verify and check one of mw.compile_step")
        if not self.passed:
            raise VerifyError(f"the verified step failed: {self.departures[0]}")
        if step.digest != self.digest:
            raise VerifyError(
                f"this step has the digest {step.digest}, the one that was verified {self.digest}: model, sizes, "
                "dtypes, layouts, passes and mesh must be those of the verification (and the version of torch)"
            )

    def __str__(self) -> str:
        lines = [f"{self.title}: {'passed' if self.passed else 'FAILED'} ({self.seconds:.1f} s)"]
        lines += [f"  first mismatch: {d}" for d in self.departures]
        for c in self.covered:
            lines += [f"  {c}", *(f"    not compared: {m}" for m in c.missed)]
        digest = [f"  digest {self.digest}"] if self.digest else []
        lines += [f"  reduced for this run: {t}" for t in self.taken]
        return "\n".join([*lines, *(f"  {n}" for n in self.notes), *digest])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"passed": self.passed, **dataclasses.asdict(self)}

    def to_json(self, **how: Any) -> str:
        """:meth:`to_dict` as one JSON object; ``how`` as for ``json.dumps``."""
        made = self.to_dict()
        for d in made["departures"]:
            d["relative"] = d["relative"] if d["relative"] < math.inf else None
        return json.dumps(made, **how)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json(indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Verification:
        """Read what :meth:`save` wrote.

        Raises:
            VerifyError: the file is none of a verification.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            _check_kinds(data)
            if data.pop("passed") is bool(data["departures"]):
                raise ValueError("it says both that it passed and that it did not")
            departures = tuple(_departure(d) for d in data.pop("departures"))
            covered = tuple(Coverage(c["mode"], c["values"], tuple(c["missed"])) for c in data.pop("covered"))
            return cls(departures=departures, covered=covered, **data | {k: tuple(data[k]) for k in ("notes", "taken")})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VerifyError(
                f"{path} is no report of mw.verify: {error!r}; write one with report.save(path)"
            ) from None


_KINDS: Mapping[str, Any] = {
    "passed": bool, "title": str, "digest": str, "seconds": (int, float), "departures": list, "covered": list,
    "notes": list, "taken": list,
}  # fmt: skip


def _check_kinds(data: Mapping[str, Any]) -> None:
    """Raises ValueError for an entry that is of another kind than what is written."""
    for name, kind in _KINDS.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"{name} is {data[name]!r}")


def _departure(data: Mapping[str, Any]) -> Departure:
    """JSON has no word for what is infinite: it is null there."""
    relative = math.inf if data["relative"] is None else float(data["relative"])
    return Departure(**{**data, "others": tuple(data["others"]), "relative": relative})
