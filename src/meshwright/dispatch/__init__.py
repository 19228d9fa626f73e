"""From a call on distributed tensors to a plan, and from the plan to local work.

``call`` (``routes``) looks a plan up, and goes its route.  ``plan_call`` decides, once per (function, specs, static
arguments), from global metadata alone: which conversions the inputs need, what runs on locals, which specs the outputs
get.  ``execute`` converts, runs and wraps.  Eager tensors and captured steps share it all: what they do each in their
own way is in a ``Frontend``.
"""

from __future__ import annotations

from . import autocast
from .autocast import ONCE, CachedCast
from .binding import Args, Kwargs
from .calls import (
    METADATA_METHODS,
    NO_KWARGS,
    call_disabled,
    disabled,
    function_named,
    map_tensors,
    mesh_of,
    op_name,
    resolve,
    spec_of,
    tensors_in,
)  # fmt: skip
from .execution import (
    CONVERT_WITH_GRAD_DTYPE,
    Execution,
    ask_gradient,
    convert_layout,
    execute,
    reduce_early,
    root,
    unit_cotangent,
    wanted,
    wanting_gradients,
)
from .keys import TensorBounds, key_of, key_part, with_numbers
from .leaves import SpecHandle, any_linked, gradient_types, link, resolve_types
from .plans import AS_OP, casts_of, make_rule, naming, plan_call
from .results import global_outputs
from .routes import ASKED, FOREACH_OVERRIDES, INTO_PLAIN, Frontend, FunctionOverride, Known, call, forget_ops
from .views import count_write, refresh, remember, remember_detached, write_through

__all__ = [
    "ASKED",
    "AS_OP",
    "CONVERT_WITH_GRAD_DTYPE",
    "FOREACH_OVERRIDES",
    "INTO_PLAIN",
    "METADATA_METHODS",
    "NO_KWARGS",
    "ONCE",
    "Args",
    "CachedCast",
    "Execution",
    "Frontend",
    "FunctionOverride",
    "Known",
    "Kwargs",
    "SpecHandle",
    "TensorBounds",
    "any_linked",
    "ask_gradient",
    "autocast",
    "call",
    "call_disabled",
    "casts_of",
    "convert_layout",
    "count_write",
    "disabled",
    "execute",
    "forget_ops",
    "function_named",
    "global_outputs",
    "gradient_types",
    "key_of",
    "key_part",
    "link",
    "make_rule",
    "map_tensors",
    "mesh_of",
    "naming",
    "op_name",
    "plan_call",
    "reduce_early",
    "refresh",
    "remember",
    "remember_detached",
    "resolve",
    "resolve_types",
    "root",
    "spec_of",
    "tensors_in",
    "unit_cotangent",
    "wanted",
    "wanting_gradients",
    "with_numbers",
    "write_through",
]  # fmt: skip
