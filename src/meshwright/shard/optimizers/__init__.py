"""Optimizers on distributed parameters.

Read ``optimizer`` (``mw.shard_optimizer``), ``binding`` (what is known of one optimizer), ``kinds`` (what is known of
classes of optimizers), ``probe`` (whether a word about a class holds), ``states`` (how states are held and split),
``owners`` (steps on whole parameters), ``shadow`` (what a step runs on), ``collected`` (what a step lists before it
computes, kept while it is the same), ``blocks`` (states that are not one value per element), ``foreach`` (lists of
tensors in one call), ``hyperparameters``.
"""
