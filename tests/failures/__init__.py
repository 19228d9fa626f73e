"""Ranks that die, disagree, drift apart or come back."""
