"""Initial values of models that were built on the meta device.

Read ``recording`` (what constructors do to meta tensors), ``replay`` (do it again, shard by shard), ``values`` (give a
model its memory and its values; errors for what nothing wrote).
"""
