"""Passes over captured programs."""
