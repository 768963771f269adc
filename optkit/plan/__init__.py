"""How a decode step runs: graph -> fused stages -> tasks on SMs -> derived edges -> weight streams. Plain data.

`types` is the Plan itself and may be imported by every reader; the rest of this package makes it.
"""
