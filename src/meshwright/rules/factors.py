"""Common factors of two shapes of the same number of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence


class _Matching:
    """The factors found so far, per dim of the two shapes; those of one shape only must stay whole."""

    def __init__(self, have: Sequence[int], want: Sequence[int]) -> None:
        self.shapes = tuple(have), tuple(want)
        self.dims: tuple[list[list[str]], list[list[str]]] = [[] for _ in have], [[] for _ in want]
        self.sizes: dict[str, int] = {}
        self.whole: set[str] = set()

    def shared(self, i: int, j: int, size: int) -> None:
        """A factor of dim ``i`` of the one and dim ``j`` of the other."""
        f = f"v{len(self.sizes)}"
        self.sizes[f] = size
        self.dims[0][i].append(f)
        self.dims[1][j].append(f)

    def own(self, side: int, k: int, size: int) -> None:
        """A factor that the other shape does not have."""
        if size != 1:
            f = f"v{len(self.sizes)}"
            self.sizes[f] = size
            self.dims[side][k].append(f)
            self.whole.add(f)

    def empty(self) -> None:
        """No element, so none has a place: equal dims at both ends correspond, the rest need not."""
        have, want = self.shapes
        most = min(len(have), len(want))
        lead = next((k for k in range(most) if have[k] != want[k]), most)
        tail = next((k for k in range(most - lead) if have[-1 - k] != want[-1 - k]), most - lead)
        for k in [*range(lead), *range(-tail, 0)]:
            if have[k] != 1:
                self.shared(k, k, have[k])
        for side, shape in enumerate(self.shapes):
            for k in range(lead, len(shape) - tail):
                self.own(side, k, shape[k])

    def elements(self) -> None:
        """From the left, so that a factor of both has one place in memory."""
        have, want = self.shapes
        i = j = 0
        a, b = 1, 1  # what is left of the dims before i and j
        while True:
            while a == 1 and i < len(have):
                a, i = have[i], i + 1
            while b == 1 and j < len(want):
                b, j = want[j], j + 1
            if a == 1 and b == 1:
                return
            shared = math.gcd(a, b)
            if shared > 1:
                self.shared(i - 1, j - 1, shared)
                a, b = a // shared, b // shared
            if a != 1 and b != 1:
                i, j = self._apart(i, j, a, b)
                a, b = 1, 1

    def _apart(self, i: int, j: int, left: int, right: int) -> tuple[int, int]:
        """Nothing more in common until both sides have consumed the same number of elements."""
        have, want = self.shapes
        self.own(0, i - 1, left)
        self.own(1, j - 1, right)
        while left != right:
            if i < len(have) and (left <= right or j == len(want)):
                left *= have[i]
                self.own(0, i, have[i])
                i += 1
            else:
                right *= want[j]
                self.own(1, j, want[j])
                j += 1
        return i, j


def match(
    have: Sequence[int], want: Sequence[int]
) -> tuple[list[list[str]], list[list[str]], dict[str, int], set[str]]:
    """Common factors of two shapes of the same number of elements.

    Returns the factors of each dim of both, the sizes of the factors, and those that stand in one shape only (which
    must stay whole).
    """
    found = _Matching(have, want)
    if 0 in have:
        found.empty()
    else:
        found.elements()
    return *found.dims, found.sizes, found.whole
