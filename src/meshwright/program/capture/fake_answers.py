"""Answers of ops on fake tensors, kept as long as the fakes' mode: equal blocks of a model ask the same again.

PyTorch has such a cache too, but describes arguments and makes results at several times the cost, and leaves out ops
that are not its own.  What is not plainly a function of the arguments' metadata is asked of PyTorch each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import compat
from ...collective import COLLECTIVES
from ...collective.graph import KEEP_ONE
from ...compat import FakeTensor, FakeTensorMode

Tensor = torch.Tensor
aten = torch.ops.aten
_PLAIN = frozenset(
    {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, complex}
)
_BUILTIN = ("aten", "prims")
_OPEN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_LIFTS = (aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
_ANSWERS = "_meshwright_answers"
_ASK = object()  # in place of a result that no template describes


class _Unlike(Exception):
    """Arguments that no key describes."""


@dataclass(frozen=True, slots=True)
class _Template:
    """A fake tensor that an op gave.

    Attributes:
        argument: number of the argument's storage that it is a view of, or None.
        attributes: those of the Python object.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    argument: int | None
    attributes: dict[str, Any]


_kinds: dict[int, tuple[Any, bool]] = {}  # by id: hashing an op runs Python


def _is_function_of_metadata(func: Any) -> bool:
    """Whether results of an op look alike whenever its arguments do."""
    known = _kinds.get(id(func))
    if known is None:
        answer = isinstance(func, compat.OpOverload) and not func._schema.is_mutable and func not in _LIFTS
        answer = answer and not any(tag in func.tags for tag in _OPEN)
        own = func in COLLECTIVES or func is KEEP_ONE.default  # their shapes come from arguments, not from the rank
        known = _kinds[id(func)] = func, answer and (own or func.namespace in _BUILTIN)
    return known[1]


class FakeAnswers:
    """Results of ops on the fakes of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.known = mode, dict[Any, Any]()

    def look_up(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[Any]]:
        """Key of a call (None: it has none), result that is known (or None), and storages of its arguments."""
        storages: list[Any] = []
        try:
            places = dict[int, int]()
            described = [self._describe(a, places, storages) for a in args]
            if kwargs:
                described += [(k, self._describe(a, places, storages)) for k, a in kwargs.items()]
        except _Unlike:
            return None, None, storages
        key = (id(func), torch.get_default_dtype(), compat.default_device(), *described)
        templates = self.known.get(key)
        if templates is None:
            return key, None, storages
        if type(templates) is _Template:
            return key, self._make(templates, storages), storages
        if templates is _ASK:
            return None, None, storages
        kind, listed = templates
        return key, kind(None if t is None else self._make(t, storages) for t in listed), storages

    def keep(self, key: Any, args: Any, storages: list[Any], out: Any) -> None:
        """Keep what PyTorch answered, if it can be made again."""
        places, fresh = {s._cdata: i for i, s in enumerate(storages)}, set[int]()
        try:
            if any(out is a for a in args):
                self.known[key] = _ASK
            elif isinstance(out, Tensor):
                self.known[key] = self._template(out, places, storages, fresh)
            elif type(out) in (tuple, list):
                self.known[key] = (
                    type(out),
                    [None if t is None else self._template(t, places, storages, fresh) for t in out],
                )
            else:
                self.known[key] = _ASK
        except (_Unlike, RuntimeError):
            self.known[key] = _ASK

    def _describe(self, a: Any, places: dict[int, int], storages: list[Any]) -> Any:
        kind = type(a)
        if kind is FakeTensor:
            if a.fake_mode is not self.mode or a.constant is not None or a._has_symbolic_sizes_strides:
                raise _Unlike
            if a.layout is not torch.strided:
                raise _Unlike
            storage = a.untyped_storage()
            place = places.setdefault(storage._cdata, len(places))
            if place == len(storages):
                storages.append(storage)
            return (
                a.shape, a.stride(), a.storage_offset(), a.dtype, a.fake_device, storage.nbytes(), place,
                compat.dispatch_keys(a).raw_repr(),
            )  # fmt: skip
        if kind in _PLAIN:
            return kind, a  # 1, 1.0 and True are equal
        if kind is list or kind is tuple:
            return kind, *[self._describe(x, places, storages) for x in a]
        raise _Unlike

    def _make(self, template: _Template, storages: list[Any]) -> Tensor:
        """A tensor like another one was."""
        if template.argument is None:
            memory = torch.empty_strided(template.shape, template.stride, dtype=template.dtype, device="meta")
        else:
            memory = torch.empty(0, dtype=template.dtype, device="meta")
            memory.set_(storages[template.argument], template.offset, template.shape, template.stride)
        made = Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=template.device
        )
        if self.mode._allow_unsafe_data_ptr_access:
            compat.set_warn_on_data_ptr(made)
        else:
            compat.set_throw_on_data_ptr(made)
        made.__dict__.update(template.attributes)
        return made

    def _template(self, t: Any, places: dict[int, int], storages: list[Any], fresh: set[int]) -> _Template:
        """What a result looks like.  Raises _Unlike where one that is made so would not be the same."""
        if type(t) is not FakeTensor or t.constant is not None or t._has_symbolic_sizes_strides or t.requires_grad:
            raise _Unlike
        storage = t.untyped_storage()._cdata
        if t.layout is not torch.strided or t.fake_mode is not self.mode or storage in fresh:
            raise _Unlike
        if storage not in places:
            fresh.add(storage)  # a result that shares its memory with another result is none that is made alone
        made = _Template(
            tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype, t.fake_device,
            places.get(storage), dict(t.__dict__),
        )  # fmt: skip
        like, plain = self._make(made, storages), torch.empty(0, device="meta")
        same = (
            made.attributes == FakeTensor(self.mode, plain, made.device).__dict__  # it remembers no values
            and like.shape == t.shape
            and like.stride() == t.stride()
            and like.storage_offset() == t.storage_offset()
            and like.untyped_storage().nbytes() == t.untyped_storage().nbytes()
            and compat.dispatch_keys(like) == compat.dispatch_keys(t)
        )
        if not same:
            raise _Unlike
        return made


def answered(ask: Any, mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What an op on fakes gives: the answer of an equal call before, or PyTorch's (``ask``)."""
    if not _is_function_of_metadata(func) or torch.is_inference_mode_enabled() or mode.propagate_real_tensors:
        return ask(mode, func, types, args, kwargs)
    known: FakeAnswers | None = mode.__dict__.get(_ANSWERS)
    if known is None:
        known = mode.__dict__[_ANSWERS] = FakeAnswers(mode)
    with compat.DisableTorchFunction(), compat.DisableTorchDispatch():
        key, out, storages = known.look_up(func, args, kwargs)
    if out is None:
        out = ask(mode, func, types, args, kwargs)
        if key is not None:
            with compat.DisableTorchFunction(), compat.DisableTorchDispatch():
                known.keep(key, args, storages, out)
    return out
