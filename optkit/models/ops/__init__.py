"""The math of every op kind, written once: `OPS[kind].ref`. Importing this package fills the registry."""

from optkit.models.ops import attention, attnres, comm, dense, kda, moe
from optkit.models.ops.base import (
    OPS,
    ChoiceError,
    Choices,
    OpDef,
    StateTensor,
    StepContext,
    WeightTensor,
    activation,
    rms_scale,
)

__all__ = [
    "OPS",
    "ChoiceError",
    "Choices",
    "OpDef",
    "StateTensor",
    "StepContext",
    "WeightTensor",
    "activation",
    "rms_scale",
    "attention",
    "attnres",
    "comm",
    "dense",
    "kda",
    "moe",
]
