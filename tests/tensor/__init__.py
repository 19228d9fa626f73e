"""PyTorch habits on distributed tensors: views, writes, autograd, autocast, reading values."""
