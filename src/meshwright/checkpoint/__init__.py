"""Checkpoints: saved without being torn, loaded onto any mesh, layout and number of processes.

Read it in this order:

    values     Python values as JSON
    arrays     arrays in files: read a little at a time
    files      a file of tensors, with checksums; what is done to a disk
    manifest   what makes a folder a checkpoint
    runs       whose checkpoints they are
    merging    what a captured step has in the middle of a merge
    contents   what there is to be saved of a model, an optimizer...
    agree      mistakes on one rank are errors on all
    saving, restore, loading
    store      ``Checkpoints``
    hugging_face, export   Hugging Face directories: from a model, from a checkpoint
    sources, dcp           files of others that weights are read from
    weights    read from all of these
    inspection what the command line shows
    moving     weights from one mesh to another, without files
"""

from __future__ import annotations

from .hugging_face import save_weights
from .moving import move
from .store import Checkpoints
from .weights import load_weights

__all__ = ["Checkpoints", "load_weights", "move", "save_weights"]
