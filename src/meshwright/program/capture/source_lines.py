"""What could not be captured, where, why, and what to write instead: lines of the user's code, known code of others.

The line that is meant is the innermost one of the model, or of code that is not installed: a helper of a library that a
model calls is not what its reader can change.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.fx.proxy import TracerBase

from ...compat import pytree
from ...errors import CaptureError, MeshwrightError
from ...ranks.runtime import is_users
from ...torch_changes import note
from .fakes import replaced

Tensor = torch.Tensor

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n *(?!File ")(?P<text>.*))?')
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


@dataclass(frozen=True)
class Frame:
    """A place in code that was running."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def _frames_of(node: fx.Node) -> list[Frame]:
    """Where a node came from, the innermost last; empty where torch did not say."""
    found = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return [Frame(m["file"], int(m["line"]), m["function"], m["text"] or "") for m in found]


def files_of(model: nn.Module) -> frozenset[str]:
    """The files in which the modules of a model are written."""
    names = {type(module).__module__ for module in model.modules()}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    return frozenset(f for f in files if f is not None and is_users(f))


def meant(frames: Sequence[Frame], files: Set[str]) -> Frame | None:
    """Of frames that are not torch's and ours, the innermost of the model (``files``) or of what is not installed."""
    users = [f for f in frames if is_users(f.file)]
    near = [f for f in users if f.file in files or not f.file.startswith(_INSTALLED)]
    return next(reversed(near or users), None)


def line_of(node: fx.Node) -> str:
    """``file:line`` of the user's code that a node came from, ``""`` where torch did not say."""
    frames = _frames_of(node)
    users = [f for f in frames if is_users(f.file)]
    return str((users or frames)[-1]) if frames else ""


def used_by(node: fx.Node) -> fx.Node | None:
    """The first use of a value of which torch says the line."""
    return next((user for user in node.users if line_of(user)), None)


# ---------------------------------------------------------------------------------------------- known code


@dataclass(frozen=True)
class Known:
    """Code of a library that a program cannot hold.

    Attributes:
        file: how the path of its file ends.
        function: its name; empty: any.
        fix: what to write instead.
        text: what its line says, as a regular expression.
        always: whatever the error is; else where the next step depends on values.
    """

    file: str
    function: str
    fix: str
    text: str = ""
    always: bool = False

    def is_at(self, frame: Frame) -> bool:
        """Whether a frame is in it."""
        return (
            frame.file.replace(os.sep, "/").endswith(self.file)
            and self.function in ("", frame.function)
            and re.search(self.text, frame.text) is not None
        )


_MOE, _CHECKS = "transformers/integrations/moe.py", "transformers/utils/import_utils.py"
_GEMMA3N = "transformers/models/gemma3n/modeling_gemma3n.py"
_CLIPPED = (
    'leave that out, vars(config)["altup_coef_clip"] = None of the text model\'s config, and clamp {}.weight behind '
    "the step"
)
_KNOWN = (
    Known(
        _MOE, "forward",
        'say model.set_experts_implementation("grouped_mm"), or "batched_mm", which do not loop over the experts that '
        "tokens chose, or train eagerly;",
    ),
    Known(
        _CHECKS, "torch_compilable_check",
        "transformers compares here what text and images bring; set TRANSFORMERS_DISABLE_TORCH_CHECK=1 in the "
        "environment, which leaves that out, or train eagerly;",
    ),
    Known(_GEMMA3N, "predict", _CLIPPED.format("prediction_coefs")),
    Known(_GEMMA3N, "correct", _CLIPPED.format("correction_coefs")),
    Known(
        "torch/nn/modules/batchnorm.py", "forward",
        "momentum=None averages over all steps so far, by a number that is read; give the BatchNorm a momentum (0.1), "
        "or train eagerly;",
    ),
    *(
        Known(file, "", "packed sequences have shapes that follow from lengths; pass the padded batch to the RNN and "
        "leave the padding out of the loss (the outputs before it are the same where the RNN is not bidirectional), or "
        "train eagerly;", text, always=True)
        for file, text in (("torch/nn/utils/rnn.py", ""), ("torch/nn/modules/rnn.py", r"torch\.zeros\(|batch_sizes"))
    ),
    Known("torch/nn/functional.py", "ctc_loss", "shapes in ctc_loss depend on the lengths of targets; train eagerly;"),
    Known(
        "", "forward", "a CTC loss reads labels, and its shapes depend on their lengths; train eagerly;",
        r"labels\.max\(\) >= self\.config\.vocab_size",
    ),
    Known(
        "/modeling_detr.py", "",
        "DETR looks whether values are finite, and its loss matches boxes by values; train eagerly;",
    ),
    Known(
        "", "", "the sizes of images are values here (image_grid_thw), and attention is cut by them; train eagerly;",
        r"lengths\.tolist\(\)|grid_thw\.tolist\(\)|get_vision_window_index\(",
    ),
)  # fmt: skip


def _fix(frames: Sequence[Frame], otherwise: str) -> str:
    return next((known.fix for frame in reversed(frames) for known in _KNOWN if known.is_at(frame)), otherwise)


def instead(node: fx.Node | None, otherwise: str) -> str:
    """What to write instead of what a node came from."""
    return otherwise if node is None else _fix(_frames_of(node), otherwise)


# ---------------------------------------------------------------------------------------------- reasons

_VALUES = (
    "it branches on the value of a tensor (if, while, .item(), a shape from values), and a captured program runs the "
    "same ops in every step: "
)
_MASKS = "use torch.where or masks, or train eagerly;"
VALUES = _VALUES + _MASKS


def refusal_at(node: fx.Node, files: Set[str]) -> str:
    """Why a node whose shape depends on values is refused, and where that is."""
    frames = _frames_of(node)
    return f"{_VALUES}{_fix(frames, _MASKS)} at {meant(frames, files) or 'unknown line'}"


@contextmanager
def naming_the_line(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[None]:
    """Inside, what goes wrong in the user's code is a CaptureError with the line, the reason, and what to write."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        found = traceback.extract_tb(error.__traceback__)
        frames = [Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in found]
        if isinstance(error, _DEFECTS) and not any(f.function == "forward" or is_users(f.file) for f in frames):
            raise MeshwrightError(
                f"{type(model).__name__} was not captured: {type(error).__name__}: {error}, at {frames[-1].file}:"
                f"{frames[-1].line}, and in no line of the step. This is a defect of Meshwright or of torch.export, "
                "not a limit of your code: please report it with this traceback, and train eagerly (mw.shard_module) "
                "meanwhile"
            ) from error
        at = meant([f for f in frames if f.function == "forward" or f.text], files_of(model))
        where = f"in {_call(loss_fn, model)}" if at is None else f"at {at.file}:{at.line}: {at.text}"
        raise CaptureError(f"{type(model).__name__} cannot be captured: {_reason(error, frames)} {where}") from error


def _reason(error: Exception, frames: Sequence[Frame]) -> str:
    text = str(error)
    kind = type(error).__name__
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in kind or kind in _BY_VALUES:
        return _VALUES + _fix(frames, _MASKS)
    if "cast NotImplemented to Tensor" in text:
        return (
            "the loss function closes over a DistTensor: reach parameters through the model that it is given, and make "
            "other modules part of that model;"
        )
    always = [known.fix for frame in reversed(frames) for known in _KNOWN if known.always and known.is_at(frame)]
    if always:
        return always[0]
    return f"{kind}: {text.strip().splitlines()[0] if text.strip() else ''};"


_DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
_BY_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")

# ---------------------------------------------------------------------------------------------- the call


def own_loss(model: nn.Module, batch: Any) -> Any:
    """Of a model that computes its loss itself.  Raises CaptureError where its forward does not take the batch."""
    args, kwargs = _given(batch)
    try:
        return model(*args, **kwargs)
    except TypeError:
        named = inspect.signature(model.forward)
        try:
            named.bind(*args, **kwargs)
        except TypeError as error:
            takes = ", ".join([str(p).partition(":")[0].partition("=")[0] for p in named.parameters.values()][:8])
            raise CaptureError(
                f"compile_step(model, None, ...) calls {_call(own_loss, model, batch)}, and forward({takes}) of "
                f"{type(model).__name__} does not take that ({error}): name the tensors of the batch as forward does, "
                "or say what to call, loss_fn=lambda model, batch: model(batch)"
            ) from None
        raise


def _given(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _call(loss_fn: Callable[..., Any], model: nn.Module, batch: Any = None) -> str:
    """What the step calls, as one would write it."""
    if loss_fn is not own_loss:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        return f"{'loss_fn' if name == '<lambda>' else name}(model, batch), which compile_step calls for the loss"
    if isinstance(batch, dict):
        return f"{type(model).__name__}({', '.join(f'{k}=...' for k in batch)})"
    return f"{type(model).__name__}({', '.join(['...'] * len(batch)) if isinstance(batch, (tuple, list)) else '...'})"


def check_returned(loss_fn: Callable[..., Any], model: nn.Module, made: Any) -> None:
    """Raises CaptureError for what is no loss."""
    flat = pytree.tree_leaves(made)
    if flat and isinstance(flat[0], Tensor) and flat[0].numel() == 1:
        return
    shape = f" that begins with one of shape {tuple(flat[0].shape)}" if flat and isinstance(flat[0], Tensor) else ""
    kind = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"{type(made).__name__}{shape}"
    fix = "return its mean, say"
    if made is not None and not isinstance(made, Tensor) and (not flat or not isinstance(flat[0], Tensor)):
        kind = "a number" if type(made).__name__ in ("SymFloat", "SymInt", "float", "int") else kind
        fix = "return the tensor, without .item() or float(): a step computes its gradient"
    if loss_fn is own_loss:
        fix = (
            f"without a loss_fn {type(model).__name__} itself must return the loss (models of transformers do where "
            "the batch has labels); or give loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), say"
        )
    raise CaptureError(
        f"the loss function must return a scalar tensor, or a tuple that begins with one, and returned {kind}: {fix}"
    )


note(
    "torch.fx.proxy.TracerBase._filter_traceback_frames",
    "torch.fx.proxy.CapturedTraceback",
    why="nodes are noted with the user's lines",
)


class _UsersStacks:
    """In place of ``CapturedTraceback``: the user's frames of the step.

    Torch's own describes all frames, of which a hundred are torch's, and reads the line of each.
    """

    def __init__(self, own: str) -> None:
        self.own = own
        self.formatted: dict[Any, list[str]] = {}

    def extract(self) -> _UsersStack:
        """The frames of the caller."""
        frame, frames = sys._getframe(1).f_back, []
        while frame is not None and frame.f_code.co_filename != self.own:
            code = frame.f_code
            if is_users(code.co_filename):
                frames.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return _UsersStack(frames[::-1], self.formatted)


class _UsersStack(traceback.StackSummary):
    def __init__(self, frames: Sequence[tuple[str, int, str]], formatted: dict[Any, list[str]]) -> None:
        super().__init__(traceback.FrameSummary(*f, lookup_line=False) for f in frames)
        self.frames, self.formatted = tuple(frames), formatted

    def summary(self) -> _UsersStack:
        """Itself."""
        return self

    def format(self, **options: Any) -> list[str]:
        """Its text, which many nodes have in common."""
        if self.frames not in self.formatted:
            self.formatted[self.frames] = super().format(**options)
        return self.formatted[self.frames]


@contextmanager
def noting_users_frames(own: str) -> Iterator[None]:
    """Inside, torch notes the user's frames of each op, whatever their functions are called.

    By itself it keeps those of methods called ``forward``, and then nothing tells the lines of a loss function.

    Args:
        own: the file that calls the step: its callers are of no interest.
    """
    with (
        replaced(fx.proxy, CapturedTraceback=_UsersStacks(own)),
        replaced(TracerBase, _filter_traceback_frames=lambda tracer, frames: frames),
    ):
        yield


__all__ = [
    "VALUES",
    "check_returned",
    "files_of",
    "instead",
    "line_of",
    "naming_the_line",
    "noting_users_frames",
    "own_loss",
    "refusal_at",
    "used_by",
]
