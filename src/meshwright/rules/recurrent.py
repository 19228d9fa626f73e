"""Recurrent layers: rows of the batch are independent of each other, all else is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .dims import names
from .factor_notation import Arg, Letters, Rule, notation, rule


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(
    input: Arg,
    hx: Any,
    params: Any,
    has_biases: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    train: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> Rule | None:
    """The batch may be split, in the input, in the states and in the results.

    Packed sequences, which have no dim of rows, and dropout between layers, which draws for all rows, have no rule.
    """
    states: Sequence[Arg] = [hx] if isinstance(hx, Arg) else list(hx)
    packed = isinstance(params, Arg) or input.ndim != 3
    if packed or (dropout and train and num_layers > 1):
        return None
    inside: dict[Any, Letters] = {s: ["l", "b", f"h{i}"] if i else ["l", "b", "h"] for i, s in enumerate(states)} | {
        p: names(f"p{i}_", p.shape) for i, p in enumerate(params)
    }
    order = ["b", "t"] if batch_first else ["t", "b"]
    made = [[*order, "o"], *(inside[s] for s in states)]
    sizes = {"o": states[0].shape[-1] * (2 if bidirectional else 1)}
    letters = {str(x) for dims in (*inside.values(), [*order, "i", "o"]) for x in dims} - {"b"}
    return notation({input: [*order, "i"], **inside}, *made, sizes=sizes, whole=letters, heavy=True, padded=True)
