"""Documents as rows of tokens for language models: ``mw.Packed``.

``reading``: documents of files; ``tokens``: their tokens, once, in files that are memory-mapped; ``packing``: which
documents are in which row, a function of their lengths; ``packed``: the dataset.  Nothing here knows about meshes.
"""

from __future__ import annotations

from .packed import Packed

__all__ = ["Packed"]
