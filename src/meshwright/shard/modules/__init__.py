"""Modules whose parameters become DistTensors.

Read ``module`` (``mw.shard_module``), ``constraints`` (layouts of activations), ``agreement`` (what ranks that shard
one model have alike).
"""
