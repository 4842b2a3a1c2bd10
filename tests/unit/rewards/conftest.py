"""Fixtures of the reward tests: one verifier pool for all tests that only need verdicts."""

from collections.abc import Iterator

import pytest

from grpo_ray.rewards.sandbox.pool import VerifierPool


@pytest.fixture(scope="session")
def pool() -> Iterator[VerifierPool]:
    """A pool of two workers. Tests that break a pool create their own."""
    # Far more than any answer needs (0.5 s of CPU time), so that a busy machine changes no verdict.
    with VerifierPool(processes=2, time_limit=60.0) as shared:
        yield shared
