"""Plan -> one persistent CuTe DSL kernel: descriptor table, compilation to PTX and cubin, launch facts.

Only this package imports CuTe DSL, and only inside functions or in `kernels/`.
"""
