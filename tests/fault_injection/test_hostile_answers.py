"""Test of the verifier pool with the whole corpus of hostile answers."""

import os
from pathlib import Path

import pytest
from judged_answers import FIXTURES, OVER_LIMIT, RIGHT, load
from process_watch import cpu_seconds

from grpo_ray.rewards.sandbox.pool import VerifierPool

HOSTILE = load(FIXTURES / "hostile.jsonl")
ALLOWANCE = 60.0
"""CPU seconds for all answers that stay within their limit; measured 8 s on an idle core."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_pool_hostile_corpus_costs_bounded_cpu_and_memory() -> None:
    assert len(HOSTILE) >= 150 and {row["id"] for row in HOSTILE} >= OVER_LIMIT
    # Longer than the default limit: normal answers need 0.5 s of CPU time, and must get it on a busy machine too.
    limit = 10.0
    with VerifierPool(processes=2, time_limit=limit) as pool:
        pool.grade(RIGHT[:8])
        assert pool.pid is not None
        memory = resident_bytes()
        verdicts = pool.grade([(row["completion"], row["solution"]) for row in HOSTILE])
        grown = resident_bytes() - memory
        # CPU time and not wall time, which depends on the load of the machine.
        seconds = cpu_seconds(pool.pid)
        counts = pool.counts
    judged = dict(zip((row["id"] for row in HOSTILE), verdicts, strict=True))
    wrong = [
        (row["id"], row["reward"], judged[row["id"]])
        for row in HOSTILE
        if row["reward"] is not None and judged[row["id"]].reward != row["reward"]
    ]
    assert wrong == []
    assert all(verdict.reward in (0.0, 1.0) for verdict in verdicts)
    timeouts = {name for name, verdict in judged.items() if verdict.status == "timeout"}
    assert timeouts <= OVER_LIMIT
    assert all(verdict.status == "ok" for name, verdict in judged.items() if name not in timeouts)
    assert counts["timeout"] == len(timeouts)
    # A hanging answer costs at most its limit, or the limit plus 2 to 3 s if only RLIMIT_CPU stops it.
    assert seconds <= (limit + 3.0) * len(timeouts) + ALLOWANCE
    assert grown < 100 << 20
