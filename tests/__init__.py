"""The tests, in folders as in ``src``; ``support/`` has what they share, ``project/`` what is true of the checkout."""
