"""Mutants of the core: small changes of its code, each of which some test should notice.

mutmut says what is changed (its operators); how mutants are judged is ours.  Its own runner judges in a process that
has run all tests before, whose caches of plans hide every mutant of a planner, and calls functions through others,
which whoever looks at frames and signatures can see.  Here each mutant has a process of its own, forked from one that
has collected the tests and run none (see ``session``), and only tests that reach the changed lines run.
"""
