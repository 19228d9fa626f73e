"""Batches become DistTensors: ``loader`` (``mw.shard_dataloader``), ``padding`` (to a few sizes)."""
