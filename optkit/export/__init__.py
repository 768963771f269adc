"""Artifacts and the vLLM plugin.

`manifest` writes and verifies artifacts, `support` decides whether one fits a running engine, `vllm_plugin` is vLLM's
entry point. Nothing here may import Hydra or CuTe DSL: serving needs neither.
"""
