"""``meshwright train``."""
