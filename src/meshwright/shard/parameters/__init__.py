"""How a parameter is kept: under which name, in which dtypes, on which device, packed with which others.

Read ``names``, ``precision``, ``host`` (parameters on the host), ``packing`` (many tensors in one collective),
``versions`` (whether one was written to).
"""
