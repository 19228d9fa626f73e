"""Collectives and bytes of a training step against what is written by hand: Megatron-LM, DDP, and both together.

The expected figures are derived here, from the shapes of the model, not measured.
"""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright import collective
from meshwright.train.choices import VOCABULARY
from meshwright.train.config import TrainConfig
from meshwright.train.loop import Trainer, subject_of

LAYERS, HIDDEN, HEADS, SEQ, BATCH, ITEM = 2, 16, 4, 8, 8, 8  # ITEM: bytes of a float64


def step_of(mesh: dict[str, int], **options):
    """Counts of the third training step: (forward and backward, update)."""
    config = TrainConfig(
        mesh=tuple(mesh.items()), layers=LAYERS, hidden=HIDDEN, heads=HEADS, seq=SEQ, batch=BATCH, dtype="float64",
        **options,
    )  # fmt: skip
    subject = subject_of(config)
    made = mw.Mesh(mesh)

    def run():
        trainer = Trainer(config, made, subject)
        for step in range(2):
            trainer.backward(step)
            trainer.update()
        with collective.counting() as both:
            trainer.backward(2)
        with collective.counting() as update:
            trainer.update()
        return both, update

    seen = mw.simulate(run, made)
    assert all(repr(s) == repr(seen[0]) for s in seen)
    return seen[0]


def all_reduce(n: int, numel: int) -> int:
    return 2 * (n - 1) * numel * ITEM // n


def parameters(tp: int = 1) -> int:
    """Elements of all parameters that one rank of ``tp`` holds."""
    h = HIDDEN
    split = 2 * VOCABULARY * h + LAYERS * (3 * h * h + 3 * h + h * h + 4 * h * h + 4 * h + 4 * h * h)
    whole = SEQ * h + LAYERS * (4 * h + 2 * h) + 2 * h
    return split // tp + whole


def activation(dp: int = 1) -> int:
    return BATCH // dp * SEQ * HIDDEN


def megatron_bytes(tp: int, dp: int = 1) -> tuple[int, int]:
    """(collectives, bytes) of tensor parallelism in one step.

    Per block two all-reduces of the activations forward (after attention and after the MLP) and two backward; one
    forward for the vocabulary-parallel embedding; one backward before the vocabulary-parallel head.  Its cross entropy
    exchanges, per token, the maximum, the sum of exponentials and the target's logit: three small all-reduces in
    Megatron-LM.  Here the target's logit joins the loss as a Partial, which leaves two.
    """
    big = 4 * LAYERS + 2
    return big + 2, big * all_reduce(tp, activation(dp)) + 2 * all_reduce(tp, BATCH // dp * SEQ)


def test_tensor_parallel_is_megatrons():
    both, update = step_of({"tp": 4})
    count, nbytes = megatron_bytes(4)
    assert both.kinds == {"all_reduce": count}
    assert both.total_bytes == nbytes
    assert not update.total


def test_data_parallel_is_ddps():
    both, update = step_of({"dp": 4})
    # DDP reduces every gradient once: here in one bucket.
    assert both.kinds == {"all_reduce": 1}
    assert both.total_bytes == all_reduce(4, parameters())
    assert not update.total


def test_both_are_both():
    both, update = step_of({"dp": 2, "tp": 2})
    count, nbytes = megatron_bytes(2, dp=2)
    assert both.kinds == {"all_reduce": count + 1}
    assert both.bytes_by_axes == {("tp",): nbytes, ("dp",): all_reduce(2, parameters(tp=2))}
    assert not update.total


@pytest.mark.parametrize("k", [1, 2, 4])
def test_accumulation_sends_gradients_once_per_step(k):
    both, update = step_of({"dp": 4}, accumulate=k)
    assert both.kinds == {"all_reduce": 1}
    assert both.total_bytes == all_reduce(4, parameters())
    assert not update.total


def test_sequence_parallel_is_megatrons():
    tp, dp = 2, 2
    both, _ = step_of({"dp": dp, "tp": tp}, sequence_parallel=True)
    half = (tp - 1) * activation(dp) * ITEM // tp
    # Each all-reduce of tensor parallelism becomes an all-gather on one side and a reduce-scatter on the other:
    # two of each per block forward, one reduce-scatter after the embedding, one all-gather before the head, and their
    # transposes.
    pairs = 2 * (2 * LAYERS + 1)
    assert both.kinds["reduce_scatter"] == pairs
    assert both.bytes["reduce_scatter"] == pairs * half
    assert both.kinds["all_gather"] == pairs
    assert both.bytes["all_gather"] == pairs * half
    # Norms and positions work on their part of the sequence: their gradients are reduced over both axes at once.
    norms = (4 * LAYERS + 2) * HIDDEN + SEQ * HIDDEN
    assert both.bytes_by_axes["dp", "tp"] == all_reduce(dp * tp, norms)
    assert both.bytes_by_axes["dp",] == all_reduce(dp, parameters(tp) - norms)
