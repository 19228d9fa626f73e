"""The harnesses of ``conformance/`` and ``bench/``: what they try, how they judge, that they can fail."""
