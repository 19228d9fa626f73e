"""Batches become DistTensors.

``dataloader``: ``mw.shard_dataloader``; ``batches``: one batch, laid out and compared; ``loader``: loaders that are
wrapped; ``rows``: datasets, of which each rank reads its own rows, with ``order`` and ``reading``; ``padding``.
"""
