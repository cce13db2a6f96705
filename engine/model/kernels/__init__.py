"""Triton kernels of the layers, one a file. Each has a slow twin in plain torch and needs a GPU."""
