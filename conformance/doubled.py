"""float64 for models that upcast parts of their arithmetic to float32."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

import meshwright as mw


class _Doubled(types.ModuleType):
    """``torch`` with float64 where a model writes float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64, and code of transformers and diffusers that asks for float32 gets float64.

    Models upcast parts of their arithmetic to float32 (rotary embeddings, norms, softmax), which would round it here.
    """
    doubled, before = _Doubled("torch"), torch.get_default_dtype()
    methods = {kind: kind.float for kind in (mw.DistTensor, torch.Tensor)}
    packages = ("transformers.", "diffusers.")
    patched = [m for n, m in list(sys.modules.items()) if n.startswith(packages) and m.__dict__.get("torch") is torch]
    torch.set_default_dtype(torch.float64)
    for kind in methods:
        kind.float = kind.double
    for module in patched:
        module.__dict__["torch"] = doubled
    try:
        yield
    finally:
        for module in patched:
            module.__dict__["torch"] = torch
        for kind, plain in methods.items():
            kind.float = plain
        torch.set_default_dtype(before)
