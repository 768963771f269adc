"""Device code: ordinary source files that CuTe DSL traces. `megakernel` composes roles, ring, sync and op bodies."""
