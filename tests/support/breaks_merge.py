"""Further breaks for rows of ``docs/seeds.md``, chosen without sight of their tests.  See :mod:`seeds`."""

# fmt: off
OTHERS = [
    ("Accumulate, then apply under a condition", "passes/gradient_merge.py",
     '"flush": ("flush",)}',
     '"flush": (WHOLE,)}'),
    ("Accumulate, then apply under a condition", "program/run/cycle.py",
     "return made.schedules[STEP][self.done]",
     "return made.schedules[STEP][-1]"),
    ("Accumulate, then apply under a condition", "passes/gradient_merge.py",
     "self._added(program.graph, named[s.node.name], named[s.place.name], end)",
     "pass"),
    ("Accumulate, then apply under a condition", "passes/gradient_merge.py",
     "        self._total(sums, nodes)\n        schedules",
     "        schedules"),
    ("Accumulate, then apply under a condition", "passes/gradient_merge.py",
     "            return made\n        return self._leftover(made) if self.avg else made",
     "            return made\n        return made"),
]
