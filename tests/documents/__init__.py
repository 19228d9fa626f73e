"""Documents packed into rows of tokens."""
