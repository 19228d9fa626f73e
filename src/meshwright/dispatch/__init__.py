"""From a call on distributed tensors to a plan, and from the plan to local work.

``plan_call`` decides, once per (function, specs, static arguments), from global metadata alone: which conversions the
inputs need, what runs on locals, which specs the outputs get.  ``execute`` converts, runs and stamps.  Eager tensors
and the static program share both; neither knows which of them is calling.
"""

from __future__ import annotations

from . import autocast
from .calls import (
    QUESTIONS,
    Op,
    call_disabled,
    disabled,
    forget_ops,
    function_named,
    key_part,
    map_tensors,
    mesh_of,
    op_name,
    resolve,
    spec_of,
    tensors_in,
)
from .execution import (
    convert_tensor,
    execute,
    execute_swift,
    relayout,
    root,
    settle_after,
    unit_cotangent,
    wanted,
)
from .inference import (
    Inference,
    gathered,
    infer,
)
from .leaves import (
    settle,
    tie,
)
from .plans import (
    CallPlan,
    by_grad,
    global_outputs,
    make_rule,
    plan_call,
    warn_gathered,
)
from .views import (
    before,
    refresh,
    refuse_leaf,
    remember_detached,
    write_through,
)

__all__ = [
    "QUESTIONS",
    "CallPlan",
    "Inference",
    "Op",
    "autocast",
    "before",
    "by_grad",
    "call_disabled",
    "convert_tensor",
    "disabled",
    "execute",
    "execute_swift",
    "forget_ops",
    "function_named",
    "gathered",
    "global_outputs",
    "infer",
    "key_part",
    "make_rule",
    "map_tensors",
    "mesh_of",
    "op_name",
    "plan_call",
    "refresh",
    "refuse_leaf",
    "relayout",
    "remember_detached",
    "resolve",
    "root",
    "settle",
    "settle_after",
    "spec_of",
    "tensors_in",
    "tie",
    "unit_cotangent",
    "wanted",
    "warn_gathered",
    "write_through",
]
