"""Which calls of a step are compared with the program without passes, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...errors import ProgramError
from ...passes import PassManager
from ..capture.ledger import OptionUse
from ..ir.program import Program
from ..ir.subgraphs import copied
from .bind import BoundProgram, CompiledVariant
from .merged_proof import MergedProof
from .proof import Check, Outcome, Proof
from .whole_loss import Record

WORDS = ("first", "always")


class Proofs:
    """The comparisons of a step.

    Args:
        where: the function that captured it.
        transform: what applies its passes.
        check: as of ``compile_step``.
        compares: False: nothing is compared.
        whole: records the loss of a batch, given its leaves.
    """

    def __init__(self, where: str, transform: Any, check: Check, compares: bool, whole: Record | None = None) -> None:
        if check is not False and check not in WORDS:
            raise ProgramError(f"{where}: check={check!r}. Pass {', '.join(map(repr, WORDS))} or False.")
        self.where, self.check = where, check
        self._passes: tuple[Any, ...] = tuple(getattr(transform, "passes", ()))
        self._compares = compares and check is not False and bool(self._passes)
        self._open: dict[int, Proof] = {}  # by id of the programs, which it holds
        self._whole = whole
        self._merged: MergedProof | None = None
        self.outcomes: list[Outcome] = []

    def plain(self, program: Program) -> Program | None:
        """A copy of a program before its passes; None where nothing is to be compared."""
        return copied(program) if self._compares else None

    def begin(self, ready: CompiledVariant, plain: Program | None) -> None:
        """Compare the first call of these programs, where passes made them."""
        ran = [r.name for r in ready.program.passes[len(plain.passes) :]] if plain is not None else []
        if plain is None or not ran:
            return
        applied = [p for p in self._passes if p.name in ran]
        if ready.program.parts:
            if self._merged is None:
                self._merged = MergedProof(self.where, applied, self.check == "always", self._whole)
            self._merged.begin(ready, plain)
            return
        prefixes = [(p.name, PassManager(applied[: i + 1], keep_order=True)) for i, p in enumerate(applied)]
        self._open[id(ready)] = Proof(ready, plain, prefixes, self.where)

    def call(
        self, bound: Any, readies: Sequence[CompiledVariant], micros: Sequence[Sequence[Any]], cycle: tuple[int, int],
        run: Callable[[], Any],
    ) -> Any:  # fmt: skip
        """A call of the step, which is compared where it is its turn.

        Args:
            bound: what ``run`` runs, of the programs of each micro-batch.
            cycle: calls since the last update, and how many there are between two.

        Raises:
            PassError: on all ranks, before the update, where gradients differ.
        """
        if self._merged is not None and readies[0].program.parts:
            return self._merged.call(bound, readies, micros, cycle, run)
        proof = self._open.get(id(readies[0]))
        if proof is not None and proof.done and self.check != "always":
            self.outcomes.append(proof.outcome)
            del self._open[id(readies[0])]
            proof = None
        return run() if proof is None else proof.run(bound, micros[0], run)

    def early(self, done: int, calls: int, flush: Callable[[], BoundProgram]) -> None:
        """Compare what a flush would update with, after the first of the calls of an update; raises as :meth:`call`."""
        if self._merged is not None and done == 1 < calls:
            self._merged.early(flush)

    def asked(self) -> Iterator[OptionUse]:
        """What became of ``check=``."""
        if not self._compares:
            return
        merged = self._merged
        outcomes = [*self.outcomes, *(p.outcome for p in self._open.values() if p.tries)]
        outcomes += [] if merged is None else merged.outcomes
        why = "no call was compared yet"
        if outcomes:
            values, largest = sum(o.values for o in outcomes), max(o.largest for o in outcomes)
            captures = f"{len(outcomes)} capture{'s' if len(outcomes) > 1 else ''}"
            passes = ", ".join(dict.fromkeys(n for o in outcomes for n in o.passes))
            why = f"{values} values of {captures} equal those without {passes}; largest difference {largest:.1g}"
            if not all(o.finite for o in outcomes):
                why += "; some were not finite"
            why += "".join(dict.fromkeys(f"; {o.note}" for o in outcomes if o.note))
        elif not self._open and merged is None:
            why = "no pass changed the program"
        yield OptionUse("check", repr(self.check), bool(outcomes or self._open or merged), why)


__all__ = ["Proofs"]
