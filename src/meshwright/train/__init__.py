"""``meshwright train``: a byte-level GPT on real text, across a mesh, compared step by step with one device.

Read it in this order:

    options   fields of a dataclass that are options
    choices   names, defaults and bounds of options
    config    the options as one frozen value, checked before anything starts
    text      bytes of files
    data      the windows of them as rows
    model     the GPT: plain PyTorch, nothing about distribution in it
    subject   what is trained, with data, loss and layouts: that GPT
    library   the same of a model of Transformers;  users: of what a function returns
    folder    options, log and lock beside the checkpoints of a run
    evaluate  the mean loss over held-out data
    plan      the Megatron layout of that model, as globs to placements
    loop      one training step on a mesh, and the loop around it
    verify    the same training on one device, and the comparison
    launch    processes: our own, or those of a launcher
    usage     memory and arithmetic that steps take
    show      what the terminal shows;  plot: the picture of the loss;  log: what is written of each step

The command line is ``meshwright.cli.train``.  What that needs to say what is wrong with options or files (``options``,
``choices``, ``config``, ``text``) does without PyTorch.
"""

from __future__ import annotations

from .config import TrainConfig
from .options import OptionError

__all__ = ["OptionError", "TrainConfig"]
