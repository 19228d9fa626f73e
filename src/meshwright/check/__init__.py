"""``meshwright check``: rules against yardsticks that this project did not write.

``cases`` reads files, ``paddle_ops`` says which call of ours (``question``) a case asks about, ``paddle`` scores it,
``sound`` tries claims in numbers, ``report`` counts and shows, ``command`` is the command line.
"""

from .cases import Case, CaseError, read_cases
from .paddle import VERDICTS, Score, score
from .report import Tally, summary

__all__ = ["VERDICTS", "Case", "CaseError", "Score", "Tally", "read_cases", "score", "summary"]
