"""Initial values of models that were built on the meta device.

Read ``recording`` (what constructors do to meta tensors), ``outside`` (writes where nothing is recorded), ``replay``
(do it again, shard by shard), ``values`` (give a model its memory and its values; errors for what nothing wrote).
"""

from . import outside as outside
