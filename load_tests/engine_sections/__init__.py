"""The sections of `load_tests.bench_engine`, and what they share.

`report`, `rendering`, `bars` and `merging` know figures and no engine; `timing` knows the device; `bench` makes models
and engines; `load` sends requests; every other module measures one thing.
"""
