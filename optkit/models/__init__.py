"""Architectures: the graph of one decode step, its shapes, and the checkpoint's names.

`graph` is the vocabulary, `ops/` the math of each op (written once, generic in precision), one file per
architecture beside them. Nothing here knows of plans, kernels or recipes.
"""
