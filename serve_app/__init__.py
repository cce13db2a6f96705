"""Text in, text out: the engine behind HTTP on Ray Serve."""

__version__ = "0.1.0"
