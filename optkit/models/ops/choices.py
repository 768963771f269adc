"""Taking over another implementation's top-k choices, where its scores allow it.

Near ties are decided by rounding. A reference that is compared with values behind such a choice takes the other's
choice, but only if the scores of what was swapped lie within the measured score error.
"""

from __future__ import annotations

from torch import Tensor

from optkit.models.ops.base import ChoiceError, StepContext


def adopt(name: str, own: Tensor, scores: Tensor, score_error: float, ctx: StepContext, what: str = "expert") -> Tensor:
    """The other implementation's ids [R, k] instead of `own`; rows of padding keep their own.

    scores [R, n] of all ids. -1 in a row means no choice (fewer than k ids exist); both must then have as many.
    Raises ChoiceError for ids that are no choice at all and for swaps beyond the score error.
    """
    assert ctx.choices is not None
    theirs = ctx.choices.ids[name].to(own.device).long()
    result = own.clone()
    for r in range(own.shape[0]):
        if ctx.active is not None and not bool(ctx.active[r]):
            continue
        mine, other = ({i for i in t[r].tolist() if i >= 0} for t in (own, theirs))
        listed = [i for i in theirs[r].tolist() if i != -1]
        if len(other) != len(mine) or len(listed) != len(other) or max(other, default=-1) >= scores.shape[1]:
            raise ChoiceError(f"{name} row {r}: {theirs[r].tolist()}: expected {len(mine)} distinct {what} ids")
        if mine != other:
            gap = float(scores[r, sorted(mine - other)].max() - scores[r, sorted(other - mine)].min())
            if gap > score_error:
                raise ChoiceError(
                    f"{name} row {r}: chose {sorted(other - mine)} instead of {sorted(mine - other)}, score gap "
                    f"{gap:.3g}: expected at most the score error {score_error:.3g}"
                )
            ctx.choices.adopted.append((name, r, gap))
        result[r] = theirs[r]
    return result
