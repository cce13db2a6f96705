"""A deployment of many replicas in pure Python: the real routing policy and others, on the same requests."""
