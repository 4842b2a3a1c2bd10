"""Tests of the parts of the audit that need no cluster: lengths, samples, neighbours and the policy's files."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.loader import load_config
from grpo_ray.data.files import file_shards
from grpo_ray.data.stream import Split
from grpo_ray.driver.preflight.audit import LengthSummary, ShardSlice, audit, is_sampled, summarise_lengths
from grpo_ray.driver.preflight.policy_files import fetch_policy_files
from grpo_ray.errors import ConfigError

QUICK = settings(max_examples=100, deadline=None, derandomize=True)


def write_problems(path: Path, count: int) -> str:
    rows = [{"prompt": f"{n}?", "solution": str(n)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_audit_sample_of_zero_raises() -> None:
    with pytest.raises(ConfigError, match="sample=0"):
        audit(load_config(), sample=0)


def test_summarise_lengths_uses_nearest_rank() -> None:
    lengths = np.arange(1, 101, dtype=np.uint32)  # 1 to 100
    assert summarise_lengths(lengths, 90) == LengthSummary(50, 90, 99, 100, limit=90, over_limit=10)  # 91 to 100
    assert summarise_lengths(np.array([7], np.uint32), 7) == LengthSummary(7, 7, 7, 7, 7, 0)


@QUICK
@given(lengths=st.lists(st.integers(1, 300), min_size=1), limit=st.integers(1, 300))
def test_summarise_lengths_percentiles_are_ordered(lengths: list[int], limit: int) -> None:
    found = summarise_lengths(np.array(lengths, np.uint32), limit)
    assert found.p50 <= found.p90 <= found.p99 <= found.max == max(lengths)
    assert {found.p50, found.p90, found.p99} <= set(lengths)
    # Half of the lengths, rounded up, do not exceed the median; fewer stay below it.
    assert sum(n <= found.p50 for n in lengths) >= len(lengths) / 2 > sum(n < found.p50 for n in lengths)
    assert found.over_limit == sum(n > limit for n in lengths)


def test_is_sampled_takes_share_of_any_range_of_ids() -> None:
    ids = [f"{n * 2**54:016x}" for n in range(1024)]  # evenly over all ids
    assert sum(is_sampled(each, 0.25) for each in ids) == pytest.approx(256, abs=16)
    lowest = [f"{n * 2**44:016x}" for n in range(1024)]  # the lowest thousandth, which data.heldout_share cuts off
    assert sum(is_sampled(each, 0.25) for each in lowest) == pytest.approx(256, abs=16)


@QUICK
@given(number=st.integers(0, 2**64 - 1), share=st.floats(0, 1), larger=st.floats(0, 1))
def test_is_sampled_larger_share_keeps_smaller_sample(number: int, share: float, larger: float) -> None:
    problem = f"{number:016x}"
    assert is_sampled(problem, 1.0) and not is_sampled(problem, 0.0)
    assert is_sampled(problem, max(share, larger)) >= is_sampled(problem, share)


@pytest.mark.parametrize(
    ("count", "start", "stop", "pairs"),
    [
        (4, 0, 2, ["01", "12"]),
        (4, 2, 4, ["23", "32"]),  # the last of the shard gets the one before
        (4, 0, 4, ["01", "12", "23", "32"]),
        (4, 3, 4, ["32"]),  # also if the slice has no other
        (1, 0, 1, ["00"]),
    ],
)
def test_shard_slice_pairs_each_problem_with_next_row(
    tmp_path: Path, count: int, start: int, stop: int, pairs: list[str]
) -> None:
    (shard,) = file_shards(write_problems(tmp_path / "some.jsonl", count))
    slice_of_shard = ShardSlice(Split("some", ()), shard, start, stop, sample_share=1.0)
    assert [one.solution + other.solution for one, other in slice_of_shard.pairs()] == pairs


def test_fetch_policy_files_leaves_out_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 8)
    folder = Path(fetch_policy_files(f"file://{tmp_path}"))
    assert [file.name for file in folder.iterdir()] == ["config.json"]
