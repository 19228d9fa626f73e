"""Captured steps: programs per batch shape, the schedules that run them, a state to save."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn as nn

from .. import drawing
from ..collective import COLLECTIVES, Fact, together
from ..compat import pytree
from ..errors import ExplicitError, ProgramError
from ..explanation import Explanation, check_budget, explain_program
from ..mesh import Mesh
from ..passes.agreement import Answers, Exchange, exchanging
from ..ranks import runtime
from ..shard.initialization.values import check_loaded
from ..shard.optimizers.kinds import own_work
from .capture.build import Built, Plan
from .capture.export_caches import forgotten
from .capture.free_variables import Place
from .capture.interrupts import interrupts_deferred
from .capture.ledger import OptionUse, ledger_of
from .capture.optimizers import check_unscaled, difference, numbers_of, options_of, parts_of
from .capture.scale import SCALE
from .check.digest import digest_of
from .check.facts import CAPTURED, REBUILD, decided, numbers, program_facts
from .ir.loss_weight import Weighing
from .ir.program import STEP, Program
from .ir.sizes import Unlike
from .run.batches import BatchStructure, shapes_of, split_batch
from .run.bind import BACKENDS, CompiledVariant, StepState
from .run.constants import Constants
from .run.cuda_graphs import graphs_of
from .run.cycle import Cycle
from .run.guard import Guard, modes, switched_back
from .run.lengths import Capture, Lengths, Read
from .run.peers import Peers, doing
from .run.pipeline import check_rows, cut_batch
from .run.proof import Check
from .run.proofs import Proofs
from .run.replay import Tell, replay
from .standalone import sections_of, to_python

if TYPE_CHECKING:
    from .capture.conditions import Conditions

Tensor = torch.Tensor
_MANY = 8  # shapes of batches


@dataclass(frozen=True)
class Recorded:
    """A step as it was captured.

    Attributes:
        program: this rank's, before any passes.
        leaves: name of a batch input to its place among the leaves of a batch.
        tree: how the loss and what came with it were returned; None for a loss alone.
        module: the graph of global values, if there is one: its numbers are the same on all ranks.
        places: where the step found tensors outside of the model.
        built: all that the stages returned, of a step of global values.
        plain: the program before any passes, where it is to be compared with what they made.
        answers: what passes heard of other ranks.
    """

    program: Program
    leaves: Mapping[str, int]
    tree: Any
    module: Any = None
    places: Sequence[Place] = ()
    built: Built | None = None
    plain: Program | None = None
    answers: Answers = field(default_factory=Answers)


@dataclass(frozen=True)
class CaptureSource:
    """What a step is captured from.

    Attributes:
        model, optimizer, mesh: what it trains, and where.
        plan: what was said of it.
        name: of the function that captures, for messages.
        by_hand: whether it was written for one rank: hooks are captured, batches and losses are a rank's own.
    """

    model: nn.Module
    optimizer: Any
    mesh: Mesh
    plan: Plan
    name: ClassVar[str]
    by_hand: ClassVar[bool]

    def record(self, batch: Any, train: bool, again: bool, weighing: Weighing | None = None) -> Recorded:
        """Capture it for batches like this one.

        Args:
            train: or only compute the loss.
            again: it was captured before.
            weighing: a pass asks how much micro-batches count.
        """
        raise NotImplementedError

    def conditions(self, batch: Any, dims: Mapping[int, Sequence[int]]) -> Conditions:
        """What sizes of batches must fulfil, so that one program serves many; steps by hand do not say.

        Args:
            dims: of the batch's tensors, by number, those of which the sizes vary.
        """
        raise Unlike(f"{self.name} does not say what it does with sizes")

    def reads(self) -> Read:
        """The numbers that the user's code may read, which a program holds as they were."""
        return ()

    def constants(self) -> Mapping[str, Any]:
        """Those of them that are looked at between steps, by name."""
        return {}

    @property
    def more(self) -> Mapping[str, Any]:
        """What was said that is no part of the plan."""
        return {}

    def prepare(self, recorded: Recorded) -> None:
        """Make model and optimizer what the first capture wants them to be."""


class CompiledStep:
    """A captured training step.  Call it with a batch; it returns the loss.

    Of global tensors (``compile_step``) the loss is a DistTensor; of a step by hand (``capture_local``) batch and loss
    are this rank's.

    Batches of another shape are captured when they come; the programs used last are kept.

    Attributes:
        most_programs: how many are kept.
        model, optimizer, mesh: what it trains, and where; of several optimizers ``optimizer.parts``.
        carrier, cycle: what its programs work on, and where it is between two updates.
        training: whether calls train or only compute the loss.
        built: all that the stages returned for the example batch, of ``compile_step``.
        compares: False: steps made from then on compare nothing, whatever ``check=`` is.
    """

    most_programs = 32
    compares: ClassVar[bool] = True

    @torch.inference_mode(False)  # a step trains, whatever is on around it; this turns gradients on too
    def __init__(
        self,
        source: CaptureSource,
        example_batch: Any,
        *,
        transform: Callable[[Program], Program],
        backend: str | None = None,
        check: Check = "first",
    ) -> None:
        if backend not in BACKENDS:
            raise ProgramError(f"backend={backend!r}: None, 'inductor' or 'cudagraphs' was expected")
        if backend == "cudagraphs" and source.mesh.device != "cuda":
            raise ProgramError(
                f"backend='cudagraphs' needs a mesh of GPUs, and this mesh is on {source.mesh.device!r}. Leave backend "
                "out, or create the mesh with device='cuda'."
            )
        self.mesh, self.model, self.optimizer = source.mesh, source.model, source.optimizer
        self.training = True
        self._source, self._transform = source, transform
        self._proofs = Proofs(source.name, transform, check, self.compares, self._loss_alone)
        self._ready: dict[Any, CompiledVariant] = {}  # the one used last at the end
        self._answers: dict[Any, Answers] = {}  # of the last capture, by what else than sizes a program is made for
        self._captured: Counter[Any] = Counter()  # shapes of batches, by what else a program is made for
        self._splits = int(getattr(transform, "splits", 1))  # micro-batches of a call
        self._structure = BatchStructure(example_batch)
        with together(self.mesh, source.name):
            leaves = self._micro_batches(pytree.tree_leaves(example_batch))[0]
        example_batch = self._structure.nested(leaves)
        recorded = self._recorded(example_batch, again=False)
        self.built, self._options, self._example = recorded.built, options_of(self.optimizer), recorded.answers
        self._digest: str | None = None
        graphs = {"graphs": str(graphs_of(recorded.program))} if backend == "cudagraphs" else {}
        self._ledger = self._asked(recorded, {**source.more, "backend": backend, **graphs})
        source.prepare(recorded)
        updates, how = bool(recorded.program.update), source.plan.loss_scale
        self.carrier = StepState(self.model, self.optimizer, updates, source.plan.gradients, backend)
        if how is not None:
            self.carrier.scale = how.state(self.mesh.device)
        self.cycle = Cycle(self.carrier)
        self._numbers = numbers_of(self.optimizer)
        self._guard = Guard(self.model, source.by_hand)
        signature = self._signature(pytree.tree_leaves(example_batch))
        self._first, self._captured[signature[:-1]] = signature[-1], 1
        self._named = False
        self._lengths = Lengths(self.mesh)
        self._peers = Peers(self.mesh, self.carrier, whole=not source.by_hand)
        self._constants = Constants(source.constants, source.name)
        self._install(leaves, self._bound(recorded, leaves))

    # -- compiling ------------------------------------------------------------------------------------

    def _recorded(self, batch: Any, again: bool = True) -> Recorded:
        """The step as it is captured for batches like this one, the same on all ranks."""
        with together(
            self.mesh, self._source.name, CAPTURED, REBUILD, doing=self._capturing(pytree.tree_leaves(batch))
        ) as facts:
            with forgotten(), interrupts_deferred():
                made = self._source.record(batch, self.training, again, self._weighing)
            plain, answers = self._proofs.plain(made.program) if self.training else None, Answers()
            passed = self._passed(made.program, answers.noting(facts.exchange))
            made = replace(made, program=passed, plain=plain, answers=answers)
            facts += [Fact("default dtype, deterministic algorithms, autocast", modes())]
            facts += [*numbers(options_of(self.optimizer), made.module), *program_facts(made.program)]
            facts += decided(made.program)
        self._affordable(made.program)
        return made

    def _capturing(self, leaves: Sequence[Any]) -> str:
        return "" if self._source.by_hand else doing(leaves, "the capture of a step")

    def _passed(self, made: Program, exchange: Exchange) -> Program:
        """After the passes, which may ask what other ranks see."""
        with exchanging(exchange):
            return self._transform(made) if self.training else made

    @property
    def _weighing(self) -> Weighing | None:
        """What the passes ask of a loss."""
        return getattr(self._transform, "weighing", None)

    def _loss_alone(self, leaves: Sequence[Any]) -> tuple[Program, Mapping[str, int], Any]:
        """The program of the loss of a batch, without a backward."""
        with forgotten(), interrupts_deferred():
            made = self._source.record(self._structure.nested(leaves), False, True)
        return made.program, made.leaves, made.tree

    def _asked(self, recorded: Recorded, more: Mapping[str, Any]) -> tuple[OptionUse, ...]:
        if recorded.built is None:
            return ()
        asked = getattr(self._transform, "passes", ())
        mine = self.model, self.optimizer, self._source.plan
        return ledger_of(*mine, recorded.built, recorded.program, asked, more)

    def _affordable(self, program: Program) -> None:
        """Raises ExplicitError, on all ranks, where one sends more than ``mw.explicit(budget=...)`` allows."""
        if runtime.RT.budget is not None:
            with together(self.mesh, "mw.explicit(budget=...)", kind=ExplicitError):
                check_budget(explain_program(program), runtime.RT.budget)

    def _bound(self, made: Recorded, leaves: Sequence[Any]) -> CompiledVariant:
        """A capture, ready to run; others that differ in sizes may follow from it."""
        ready = CompiledVariant(made.program, self.carrier, (made.leaves, made.tree), made.places)
        self._proofs.begin(ready, made.plain)
        self._answers[self._key(leaves)] = made.answers
        if self.carrier.backend is None:
            batch = self._structure.nested(leaves)
            capture = Capture(ready, made.module, self._source.reads())
            self._lengths.captured(
                self._key(leaves), shapes_of(leaves), capture, lambda d: self._source.conditions(batch, d)
            )
        return ready

    def _of_many(self, leaves: Sequence[Any]) -> CompiledVariant | None:
        """From the program for many sizes, where there is one for this batch."""
        key, shapes = self._key(leaves), shapes_of(leaves)
        found = self._lengths.serving(key, shapes)
        if found is None:
            return None
        many, variables = found
        with together(self.mesh, self._source.name, CAPTURED, REBUILD, doing=self._capturing(leaves)) as facts:
            made = many.ready(variables, self._source.reads())
            facts.append(Fact("a program for many sizes", (shapes, made is None)))
        if made is None:
            self._lengths.forget(key)
        else:
            made.given = [x.to("meta") if isinstance(x, Tensor) else x for x in leaves]
        return made

    def _key(self, leaves: Sequence[Any]) -> Any:
        """What a program is made for, but sizes."""
        return (*self._state(), tuple([(x.ndim, x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves]))

    @property
    def program(self) -> Program:
        """This rank's program for the batches of the last call; of merged micro-steps the one that updates."""
        ready = self._current
        if ready.many:  # the graph in use is that of another size: captured for this one, to be looked at
            given = self._structure.nested(ready.given)
            with torch.inference_mode(False), torch.enable_grad(), forgotten(), interrupts_deferred():
                made = self._source.record(given, self.training, True, self._weighing).program
            # What ranks exchanged for a capture of another size is alike, but for bytes.
            answers = self._answers.get(self._key(pytree.tree_leaves(given)), self._example).again(self.mesh.size)
            ready.program, ready.many = self._passed(made, answers), False
        return ready.program

    @property
    def ledger(self) -> tuple[OptionUse, ...]:
        """What was asked of the step, and what became of each request; of a step by hand, what its passes came to."""
        return (*self._ledger, *self._proofs.asked())

    @property
    def passes(self) -> tuple[Any, ...]:
        """What each pass did to :attr:`program`, in order: a :class:`~meshwright.passes.PassRecord` each."""
        return self._current.program.passes

    @property
    def digest(self) -> str:
        """What tells this step, as captured for the example batch, from others: the same on all ranks, and in a report
        of :func:`meshwright.verify` of the same step; empty for a step by hand."""
        if self._digest is None:
            made = self.built
            if made is None:
                self._digest = ""
            else:
                with exchanging(self._example.again(self.mesh.size)):
                    passed = self._transform(made.program)
                self._digest = digest_of(passed, made.captured.module, self._options)
        return self._digest

    def explain(self) -> Explanation:
        """Every collective of the step and why, where layouts came from, bytes and memory."""
        return explain_program(self.program, self.ledger)

    def to_python(self, path: str | PathLike[str]) -> Path:
        """Write this step as a Python file that needs only torch. All ranks call it together.

        The file has every kernel and every `torch.distributed` call, with your lines and the layouts as comments;
        repeated blocks are functions. `torchrun FILE BATCHES.pt` trains without Meshwright, with the same bits. Each
        rank's weights, optimizer states and learning rates lie beside it: `step.rank0.pt` and so on.

        Args:
            path: The file to write, `step.py`.

        Returns:
            The path.

        Raises:
            ProgramError: If the step has an optimizer that runs after the program, or an op that torch alone does not
                have; on all ranks.

        Examples:
            ```python
            mesh = mw.Mesh({"dp": 2})


            def write():
                model = nn.Linear(4, 1)
                optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 4)
                options = {"mesh": mesh, "batch": {"dp": mw.Shard(0)}}
                step = mw.compile_step(model, lambda model, x: model(x).sum(), optimizer, batch, **options)
                return step.to_python("step.py").name


            assert mw.simulate(write, mesh) == ["step.py", "step.py"]
            ```
        """
        sections = {} if self.built is None else sections_of(self.built.captured.module.graph)
        self.program  # of a program for many sizes: as captured for this one  # noqa: B018
        example = self._structure.nested([0] * self._structure.size)
        return to_python(self._current, path, sections, example, self.cycle.done)

    def train(self, mode: bool = True) -> CompiledStep:
        """Train (or, with False, only compute the loss) from now on; the model's modules are switched too."""
        if not isinstance(mode, bool):
            raise ProgramError("step.train() switches, and takes True or False: step(batch) trains on a batch")
        self.training = mode
        self.model.train(mode)
        return self

    def eval(self, batch: Any = ...) -> Any:
        """``eval()``: from now on steps compute the loss only, without dropout; the step is returned.

        ``eval(batch)``: the loss of this batch alone; training goes on as it was, in each module.
        """
        if batch is ...:
            return self.train(False)
        with switched_back(self.model, self):
            return self.train(False)(batch)

    def _install(self, leaves: Sequence[Any], made: CompiledVariant) -> CompiledVariant:
        if self.training:
            if self.optimizer is not None and bool(made.program.update) != self.carrier.updates:
                why = "the optimizer ran behind the program for its step hooks or a step() of its own, and has none now"
                raise ProgramError(f"{why}: capture the step again")
            self.cycle.join(made)
        self._constants.note(made)
        self._ready[self._signature(leaves)] = self._current = made
        while len(self._ready) > max(1, self.most_programs):
            del self._ready[next(iter(self._ready))]
        return made

    def _signature(self, leaves: Sequence[Any]) -> Any:
        shapes = tuple([(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves])
        return (*self._state(), shapes)

    def _state(self) -> tuple[Any, ...]:
        """What a program is made for, but the shapes of batches."""
        return (self._guard.number, self.training, *modes())

    def _micro_batches(self, leaves: list[Any]) -> list[list[Any]]:
        """Of a call: one where no pass cuts it."""
        return cut_batch(leaves, self._splits) if self._splits > 1 and self.training else [leaves]

    def _for(self, leaves: list[Any]) -> CompiledVariant:
        self._guard.check()
        signature = self._signature(leaves)
        found = self._ready.pop(signature, None)
        if found is not None:
            self._ready[signature] = found  # the one used last
        if self._peers.all_have(found is not None and found.follow()):
            assert found is not None
            self._constants.check(found)
            return found
        batch = self._structure.nested(leaves)
        first = self._first
        for i, (leaf, old) in enumerate(zip(leaves, first, strict=True)):
            if isinstance(leaf, Tensor) and (leaf.dtype != old[1] or leaf.ndim != len(old[0])):
                raise ProgramError(
                    f"batch tensor {i} is {leaf.dtype} of shape {tuple(leaf.shape)}, the step was captured for "
                    f"{old[1]} of shape {old[0]}: dtype and number of dims must be the same (sizes may differ: the "
                    "step is then captured again)"
                )
        if found is None:
            made = self._of_many(leaves)
            if made is not None:
                return self._install(leaves, made)
            self._count(signature, leaves)
        return self._install(leaves, self._bound(self._recorded(batch), leaves))

    def _count(self, signature: Any, leaves: Sequence[Any]) -> None:
        """Name it once that lengths vary: each new one is captured, which takes many times what a step does."""
        self._captured[signature[:-1]] += 1
        if self._captured[signature[:-1]] == _MANY and not self._named:
            self._named = True
            why = self._lengths.why(self._key(leaves))
            warnings.warn(
                f"this step was captured for {_MANY} shapes of batches, and is captured again for each new one, which "
                f"takes far longer than a step{': ' + why if why else ''}; the {self.most_programs} programs used last "
                "are kept. If lengths vary, pad them to a few sizes: mw.shard_dataloader(..., pad_to=[128, 256, 512], "
                "pad_value={...})",
                stacklevel=runtime.users_level(),
            )

    def __call__(self, batch: Any) -> Any:
        """One step on ``batch``: plain tensors hold global values, DistTensors lie as the program expects.

        With ``gradient-merge`` it is one micro-step; every ``k_steps``-th call updates.

        Returns:
            The loss (and what the loss function returned beside it), not reduced until its value is asked for.

        Raises:
            ProgramError: a batch that does not fit, an optimizer that was changed; before anything runs, on all ranks.
        """
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            with torch.inference_mode(False):
                return self(batch)
        self._unchanged()
        check_loaded(self.model)
        leaves = self._structure.leaves(batch)
        if self.training and (pipeline := self._current.program.pipeline) is not None:
            check_rows(leaves, self.mesh, pipeline.axis)
        micros = self._micro_batches(leaves)
        readies = [self._for(micro) for micro in micros]
        ready = self._current = readies[0]
        if runtime.RT.budget is not None:
            self._affordable(self.program)
        if not self.training:
            return self._peers.evaluate(ready.schedules[STEP][0], leaves)
        cycle, bound = self.cycle, self.cycle.join(ready)
        if ready.program.pipeline is not None:
            bound = cycle.pipelined(readies, micros)
        run = partial(self._peers.run, bound, leaves, cycle.done + 1 == cycle.calls, self._state())
        made = self._proofs.call(bound, readies, micros, (cycle.done, cycle.calls), run)
        cycle.done = (cycle.done + 1) % cycle.calls
        self._proofs.early(cycle.done, cycle.calls, cycle.flush)
        return made

    @torch.inference_mode(False)
    def replay(self, batch: Any, tell: Tell) -> None:
        """Run the step on a batch again, without passes and update; ``tell`` is called with each value.

        All ranks call it together.  Nothing that the step owns changes.
        """
        for leaves in self._micro_batches(self._structure.leaves(batch)):
            with torch.enable_grad(), together(self.mesh, self._source.name), forgotten(), interrupts_deferred():
                made = self._source.record(self._structure.nested(leaves), True, True)
            replay(made.program, self.carrier, (made.leaves, made.tree), leaves, tell)

    def _unchanged(self) -> None:
        if self.optimizer is None or not self.carrier.updates or not self.training:
            return
        check_unscaled(self.optimizer)
        for part in parts_of(self.optimizer):
            added = own_work(part)
            if added:
                raise ProgramError(
                    f"{type(part).__name__} has {added} since the step was captured with its update inside of the "
                    "program, which does not call it: take it away, or capture the step again (the optimizer then runs "
                    "behind it)"
                )
        numbers = numbers_of(self.optimizer)
        if numbers != self._numbers:
            raise ProgramError(
                f"the optimizer was changed after the step was captured: it had {difference(self._numbers, numbers)}. "
                "The learning rate may change; for anything else capture the step again"
            )

    # -- merged micro-steps ---------------------------------------------------------------------------

    @property
    def micro_step(self) -> int:
        """Micro-steps since the last update; 0 right after one (and always, without ``gradient-merge``)."""
        return self.cycle.done

    @property
    def loss_scale(self) -> Tensor | None:
        """By what the loss is scaled, as a tensor that changes from step to step; None without ``loss_scale``."""
        return self.carrier.scale.get(SCALE)

    def flush(self) -> bool:
        """Update now from the micro-steps since the last update: at the end of an epoch, say.

        With ``avg`` it is their mean, however many they are.

        Returns:
            Whether there were any.
        """
        if not self.cycle.done:
            return False
        self._unchanged()
        self._guard.check()
        self._peers.run(self.cycle.flush(), [], True, self._state())
        self.cycle.done = 0
        return True

    def split(self, batch: Any, dim: int = 0) -> list[Any]:
        """A batch of plain tensors as the micro-batches of one update, cut along ``dim``.

        Raises:
            ProgramError: ``k_steps`` does not divide a tensor's size.
        """
        return split_batch(batch, self.cycle.calls, dim)

    def state_dict(self) -> dict[str, Any]:
        """What a merge under way has (the number of micro-steps and this rank's sums of gradients), and the loss scale.

        The model and the optimizer have their own.
        """
        return self.cycle.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; all ranks call it, each with its own.

        Raises:
            ProgramError: sums of another program.
            DesyncError: ranks that were saved after different numbers of micro-steps.
        """
        with together(self.mesh, "load_state_dict", fix="load on every rank what was saved together") as facts:
            facts.append(Fact("numbers of micro-steps since the last update", self.cycle.loadable(state)))
        self.cycle.load(state)

    def _repr_html_(self) -> str:
        """What the step sends, for notebooks; of a pipeline its schedule too."""
        program = self._current.program
        axes = Counter((COLLECTIVES[n.target].name, str(n.args[-2])) for n in program.collectives())
        rows = [(kind, over, str(n)) for (kind, over), n in sorted(axes.items())]
        title = f"CompiledStep of {type(self.model).__name__} on {self.mesh!r}: {len(program.graph.nodes)} nodes"
        drawn = "" if program.pipeline is None else program.pipeline.schedule._repr_html_()
        return drawing.heading(title) + drawing.table(("collective", "over", "times per step"), rows) + drawn

    def __repr__(self) -> str:
        return f"<CompiledStep of {type(self.model).__name__}: {self._current.program!r}>"


__all__ = ["CaptureSource", "CompiledStep", "Recorded"]
