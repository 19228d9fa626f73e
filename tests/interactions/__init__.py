"""Meetings of two and three ordinary things: covering arrays of one table of factors, against one device.

``factors.py`` is the table, ``limits.py`` what does not go together and why, ``arrays.py`` makes the cases,
``device.py`` (plain PyTorch) and ``mesh.py`` run one, ``judge.py`` compares, shrinks and prints it.
``python -m tests.interactions --help`` runs arrays outside of pytest.
"""
