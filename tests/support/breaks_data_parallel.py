"""Further breaks for rows of ``docs/seeds.md``, chosen without sight of their tests.  See :mod:`seeds`."""

# fmt: off
OTHERS = [
    ("Fuse: bounded size, set by the user", "passes/buckets.py",
     "i = next(i for i in range(ends[j], j) if",
     "i = next(i for i in reversed(range(ends[j], j)) if"),
    ("Fuse: bounded size, set by the user", "passes/buckets.py",
     "elif sum(m.nbytes for m in members) + r.nbytes > limit:",
     "elif sum(m.nbytes for m in members) > limit:"),
    ("Fuse: bounded size, set by the user", "passes/buckets.py",
     "return max(before, exists[j]) + network.latency + wire[j] - wire[i]",
     "return max(before, exists[j]) + wire[j] - wire[i]"),
    ("Fuse: bounded size, set by the user", "passes/buckets.py",
     "if i < j and (wire[j] - wire[i - 1] > most or not fit):",
     "if i < j and not fit:"),
    ("With gradient merge", "passes/data_parallel_optimization.py",
     "works = [_Work(p) for p in parts_of(program)]",
     "works = [_Work(p) for p in parts_of(program)[:1]]"),
    ("With gradient merge", "passes/data_parallel_optimization.py",
     "parts={w.part.name: w.program for w in parts})",
     "parts=program.parts)"),
    ("With gradient merge", "passes/data_parallel_optimization.py",
     "ends = {WHOLE, *(runs[-1] for runs in program.schedules.values())}",
     "ends = {WHOLE}"),
    ("With gradient merge", "passes/data_parallel_optimization.py",
     "ends = {WHOLE, *(runs[-1] for runs in program.schedules.values())}",
     "ends = {WHOLE, *program.parts}"),
]
