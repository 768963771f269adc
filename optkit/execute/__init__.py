"""The Plan on a CPU: every task of every stage, with the kernel's rounding points, in any order the edges allow.

Assumes a Plan and the graph it was made from; knows nothing of CuTe DSL. `Executor` is the default runner on a machine
without a GPU, the engine of the interleaving fuzz, and one implementation of `StageRunner`.
"""

from optkit.execute.executor import Executor
from optkit.execute.runner import StageRunner

__all__ = ["Executor", "StageRunner"]
