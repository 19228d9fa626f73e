"""Yardsticks that Meshwright is measured against: PyTorch's op database, models, PaddlePaddle, random programs."""
