"""Kernels and helpers that the audit is tried on."""
