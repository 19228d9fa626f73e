"""DistTensor: a local tensor that knows how it lies on a mesh.

It is the local tensor itself with its class set to ``DistTensor`` and a spec attached: no wrapper, no copy, no alias
node.  Calls are intercepted above autograd (``__torch_function__``), so autograd runs natively on locals; during the
backward only transposed conversions run Python.  Making, moving and reading distributed tensors is in ``api``.

``dist_tensor`` has the class, and the other modules put in place what it does: ``gradients`` its ``.grad``,
``autograd`` the way into autograd's engine and back, ``substitutes`` what ops read in the place of a tensor,
``non_ops`` what is no op, ``torch_function`` the way from a call to its plan, ``methods`` shortcuts to that for the
commonest ones, ``opened`` what a thread sees of a tensor while it works on the part.  ``graph_marks`` are constraints
that a model leaves in its captured graph.

Once there are distributed tensors: ``autograd_functions`` is what becomes of ``torch.autograd.Function``, and
``split_checkpoints`` what checkpoints keep of their inputs.
"""

from . import methods as methods
from .dist_tensor import DistTensor, GradientHook, call_enabled, local_data, read, whole, wrap
from .global_calls import GlobalCalls, tell
from .gradients import (
    GRADIENT,
    LentGradient,
    PendingGradient,
    accumulates,
    assigned_grad,
    beside_slot,
    fits,
    guard,
    held,
    hold,
    in_slot,
    in_spec,
    stash_assigned_grad,
)
from .inference import Inference, infer, of_rule
from .opened import OpenTensor
from .substitutes import OPEN, unsharded_for_read, within

__all__ = [
    "GRADIENT",
    "OPEN",
    "DistTensor",
    "GlobalCalls",
    "GradientHook",
    "Inference",
    "LentGradient",
    "OpenTensor",
    "PendingGradient",
    "accumulates",
    "assigned_grad",
    "beside_slot",
    "call_enabled",
    "fits",
    "guard",
    "held",
    "hold",
    "in_slot",
    "in_spec",
    "infer",
    "local_data",
    "of_rule",
    "read",
    "stash_assigned_grad",
    "tell",
    "unsharded_for_read",
    "whole",
    "within",
    "wrap",
]
