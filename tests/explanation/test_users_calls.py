"""Reports name the user's call, not the internal ops that compute it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.operators import INTERNAL, USERS_CALLS

MESH = mw.Mesh({"tp": 2})


def test_a_cross_entropy_over_sharded_classes_is_named_in_both_directions() -> None:
    def run() -> tuple[str, list[tuple[str, str]]]:
        x = mw.shard_tensor(torch.randn(4, 6), MESH, {"tp": mw.Shard(1)}).requires_grad_()
        with mw.explain() as why:
            F.cross_entropy(x, torch.tensor([0, 5, 2, 3])).backward()
        return why.text(), [(r.op, r.tensor) for r in why.records]

    text, records = mw.simulate(run, MESH)[0]
    assert ("cross_entropy", "cross_entropy, row maxima") in records
    assert not [name for name in INTERNAL if name in text]


def test_names_are_of_internal_ops() -> None:
    assert USERS_CALLS.keys() <= INTERNAL.keys()
