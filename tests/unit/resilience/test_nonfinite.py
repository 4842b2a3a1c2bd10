"""Tests of the steps that `NonFiniteMonitor` skips, and of its error, without a trainer."""

import math
import pickle

import pytest
from bad_steps import Scaler, check_step

from grpo_ray.errors import GrpoRayError, NonFiniteError
from grpo_ray.resilience.nonfinite import NonFiniteMonitor


def make_monitor(max_in_a_row: int = 0) -> NonFiniteMonitor:
    return NonFiniteMonitor(max_in_a_row, list, lambda groups, step: "")


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [(math.nan, [1.0, 0.0]), (-math.inf, [1.0, 0.0]), (1.0, [math.nan, 0.0]), (1.0, [0.0, -math.inf])],
)
def test_monitor_non_finite_step_is_skipped(loss: float, gradient: list[float]) -> None:
    monitor = make_monitor(max_in_a_row=1)
    assert check_step(monitor, loss, gradient).grad is None
    assert (monitor.skipped, monitor.in_a_row) == (1, 1)
    assert check_step(monitor, 1.0, [1.0, 0.0]).grad is not None  # the bad loss is cleared
    assert (monitor.skipped, monitor.in_a_row) == (1, 0)


def test_monitor_large_gradient_keeps_step() -> None:
    assert check_step(make_monitor(), 1.0, [3e38, -3e38]).grad is not None


def test_monitor_float16_scale_above_one_keeps_step() -> None:
    monitor = make_monitor()
    assert check_step(monitor, 1.0, [math.inf, 0.0], Scaler(65536.0)).grad is not None
    assert monitor.skipped == 0
    with pytest.raises(NonFiniteError):  # a smaller scale cannot help
        check_step(monitor, 1.0, [math.inf, 0.0], Scaler(1.0))
    with pytest.raises(NonFiniteError):  # the loss is not scaled
        check_step(monitor, math.nan, [1.0, 0.0], Scaler(65536.0))


def test_non_finite_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("step 4: loss not finite")))
    assert isinstance(error, GrpoRayError) and isinstance(error, ArithmeticError)
    assert str(error) == "step 4: loss not finite"
