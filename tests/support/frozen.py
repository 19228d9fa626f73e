"""Imported last by the server that forks ranks: they share its memory, and no collection writes to it."""

from tests.support import cheap

cheap.freeze()
