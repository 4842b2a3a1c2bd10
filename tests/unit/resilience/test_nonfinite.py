"""Which steps BadNumbers skips, and its error, without a trainer."""

import math
import pickle

import pytest
from bad_steps import Scaler, check_step

from grpo_ray.errors import GrpoRayError, NonFiniteError
from grpo_ray.resilience.nonfinite import NonFiniteMonitor


def make_bad_numbers(max_in_a_row: int = 0) -> NonFiniteMonitor:
    return NonFiniteMonitor(max_in_a_row, list, lambda groups, step: "")


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [(math.nan, [1.0, 0.0]), (-math.inf, [1.0, 0.0]), (1.0, [math.nan, 0.0]), (1.0, [0.0, -math.inf])],
)
def test_bad_numbers_not_finite_skips_step(loss: float, gradient: list[float]) -> None:
    bad_numbers = make_bad_numbers(max_in_a_row=1)
    assert check_step(bad_numbers, loss, gradient).grad is None
    assert (bad_numbers.skipped, bad_numbers.in_a_row) == (1, 1)
    assert check_step(bad_numbers, 1.0, [1.0, 0.0]).grad is not None  # the bad loss is forgotten
    assert (bad_numbers.skipped, bad_numbers.in_a_row) == (1, 0)


def test_bad_numbers_large_gradient_keeps_step() -> None:
    assert check_step(make_bad_numbers(), 1.0, [3e38, -3e38]).grad is not None


def test_bad_numbers_float16_scale_above_one_keeps_step() -> None:
    bad_numbers = make_bad_numbers()
    assert check_step(bad_numbers, 1.0, [math.inf, 0.0], Scaler(65536.0)).grad is not None
    assert bad_numbers.skipped == 0
    with pytest.raises(NonFiniteError):  # a smaller scale cannot help
        check_step(bad_numbers, 1.0, [math.inf, 0.0], Scaler(1.0))
    with pytest.raises(NonFiniteError):  # the loss is not scaled
        check_step(bad_numbers, math.nan, [1.0, 0.0], Scaler(65536.0))


def test_bad_numbers_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("step 4: loss not finite")))
    assert isinstance(error, GrpoRayError) and isinstance(error, ArithmeticError)
    assert str(error) == "step 4: loss not finite"
