"""PyTorch's own op database on four gloo processes: Meshwright, and torch's DTensor beside it, against one device."""
