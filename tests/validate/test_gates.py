"""The error measure and the band rule on numbers made by hand."""

from __future__ import annotations

import pytest
import torch

from optkit.checks import check
from optkit.validate.gates import FLOOR, MIN_SAMPLES, judge, row_errors

N = MIN_SAMPLES


def test_row_errors() -> None:
    want = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    got = torch.tensor([[3.0, 4.0], [3.0, 4.5], [0.0, 0.0], [1.0, float("nan")], [1.0, 0.0]])
    assert row_errors(got, want).tolist() == [0.0, 0.1, 0.0, float("inf"), float("inf")]


def test_row_errors_flatten_what_follows_the_row() -> None:
    assert row_errors(torch.ones(2, 3, 4) * 1.5, torch.ones(2, 3, 4)).tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([0.0124] * N, "pass"),  # median 1.24 x band
        ([0.0126] * N, "fail"),
        ([0.01] * (N - 1) + [0.0199], "pass"),  # maximum 1.99 x band
        ([0.01] * (N - 1) + [0.0201], "fail"),
        ([0.01] * (N - 1), "fail"),  # too few samples
        ([0.01] * (N - 1) + [float("inf")], "fail"),
    ],
)
def test_judge(errors: list[float], status: str) -> None:
    assert judge("x", errors, [0.01] * N).status == status


def test_judge_floors_the_band_at_one_bf16_rounding() -> None:
    assert judge("x", [1.2 * FLOOR] * N, [0.0] * N).status == "pass"
    assert judge("x", [1.3 * FLOOR] * N, [0.0] * N).status == "fail"


def test_too_small_a_band_fails() -> None:
    assert judge("x", [0.0] * N, [0.0] * (N - 1)).status == "fail"


def test_records_are_plain_data() -> None:
    record = check("a", False, 1.5, 1.0, "why", "optkit run x").as_dict()
    assert record == {
        "name": "a",
        "status": "fail",
        "value": 1.5,
        "threshold": 1.0,
        "reason": "why",
        "repeat": "optkit run x",
    }
    assert judge("x", [0.0], [0.0]).as_dict()["stage"] == "x"
