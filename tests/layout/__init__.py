"""Meshes, placements, layouts and specs as values."""
