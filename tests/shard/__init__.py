"""Sharded modules: stored parameters, gradients, optimizers, precision, data loaders."""
