"""Tensors in, tensors out: layers, concept heads and their weights. Knows no sequence and no request."""
