"""Rules and conversions against the single device, by enumeration, on simulated ranks.

``check_rule`` runs an op with every layout of its inputs and with every strategy of its rule, and compares
values and gradients with those of one device on every rank.  ``check_conversion`` checks a conversion against
its transpose, ``check_program`` what a captured program says of itself.
"""

from __future__ import annotations

from ..dispatch import function_named
from .conversions import check_conversion
from .programs import check_program
from .rules import Report, check_rule
from .values import local_part

__all__ = ["Report", "check_conversion", "check_program", "check_rule", "function_named", "local_part"]
