"""Trainers of other projects on a mesh: to each of them the mesh is one device.

They were written for one process that sees the whole batch, or for many that each see a part; a sharded model is the
former.  So each entry here makes its project see one process: nothing is wrapped, batches are the global ones, no loss
is scaled by a number of processes, and files are written by the first rank from values that all ranks gathered.

- :mod:`.accelerate`: ``one_device()``, for Accelerate's ``Accelerator``
- :mod:`.trainer`: ``MeshTrainer``, the ``Trainer`` of Transformers, and the mixin ``OnMesh``
- :mod:`.fabric`: ``MeshStrategy`` for Lightning Fabric

:mod:`.transformers` has models of that library take :func:`meshwright.experts`.  :mod:`.initial_weights` initialises
its models that were built on the meta device.  None is imported with the package, and each imports what it is for.
"""
