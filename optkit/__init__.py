"""optkit: from a YAML recipe to a verified decode megakernel that vLLM can run.

Importing the package is cheap: no torch, Hydra or CuTe DSL is loaded here.
"""

__version__ = "0.1.0"
