"""The project's benchmarks: ``python -m bench`` (see README.md)."""
