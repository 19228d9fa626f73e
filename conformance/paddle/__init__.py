"""PaddlePaddle's SPMD rules as a yardstick: what they answer, and what ours do.

``cases`` reads files, ``ops`` and ``steps`` say which call of ours (``question``) a case asks about, ``scoring`` scores
it, ``sound`` tries claims in numbers, ``report`` counts and shows, ``command`` is the command line.
"""

from .cases import Case, CaseError, from_dims_mapping, read_cases
from .report import Tally, summary
from .scoring import VERDICTS, Score, score

__all__ = ["VERDICTS", "Case", "CaseError", "Score", "Tally", "from_dims_mapping", "read_cases", "score", "summary"]
