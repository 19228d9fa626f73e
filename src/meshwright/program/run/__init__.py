"""Running programs, bound to the tensors that they work on."""
