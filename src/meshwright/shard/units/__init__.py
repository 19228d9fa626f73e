"""Stored parameters that are gathered together for the forward of a module.

Read ``unit`` (a module and its stored parameters), ``forward`` (what ops see in their place), ``wholes`` (a parameter
as ops see it, of a version of what is stored), ``saved_tensors`` (what autograd keeps of it), ``stored`` (which
parameters are stored otherwise than seen).
"""
