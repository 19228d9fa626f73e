"""Checkpoints: saved, loaded, resumed, damaged, exported."""
