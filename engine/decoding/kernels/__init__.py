"""Triton kernels of decoding, one a file. Each has a slow twin in plain torch and needs a GPU."""
