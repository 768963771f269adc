"""Evidence by running: teacher-forced numerics, rollouts, task orders, repeatability, scoring of served tokens.

Everything here judges a `StageRunner` (CPU executor or GPU runtime) against the float64 reference of `models`, with the
plain bf16 implementation of `models.interpret` setting the noise band. Gates: see `gates`.
"""

from optkit.checks import Check
from optkit.validate.boundaries import boundaries
from optkit.validate.numerics import Numerics
from optkit.validate.orders import orders, repeat
from optkit.validate.per_stage import per_stage
from optkit.validate.rollout import rollout
from optkit.validate.scenario import Scenario
from optkit.validate.served import Answer, score_served
from optkit.validate.suite import Suite, make, validate

__all__ = [
    "Answer",
    "Check",
    "Numerics",
    "Scenario",
    "Suite",
    "boundaries",
    "make",
    "orders",
    "per_stage",
    "repeat",
    "rollout",
    "score_served",
    "validate",
]
