"""Random histories of a run: every problem of every epoch once, or a refusal before the first step.

`python tests/helpers/run_histories.py` lives more of them.
"""

from collections import Counter

import pytest
from run_histories import run_history


@pytest.mark.long
def test_run_any_history_uses_each_problem_of_each_epoch_once() -> None:
    counts: Counter[str] = Counter()
    for seed in range(30):
        run_history(seed, counts)
    kinds = ("kills", "damaged checkpoints", "changed datasets", "refused: changed", "mixtures", "changed mixtures")
    assert min(counts[kind] for kind in kinds) > 0


@pytest.mark.slow
def test_run_ten_thousand_histories_use_each_problem_of_each_epoch_once() -> None:
    for seed in range(10_000):
        run_history(seed)
