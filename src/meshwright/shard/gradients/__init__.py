"""Gradients that are Partial, reduced once per backward.

Read ``sync`` (when), ``backward`` (what one backward brought and sent), ``buckets`` (what travels together),
``reductions`` (what is in flight), ``replicas`` (whether values that should be the same are).
"""
