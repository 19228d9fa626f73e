"""Captured steps: capture, completion, checks, running."""
