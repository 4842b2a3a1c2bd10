"""File of a checkpoint with open rollouts."""

import math
from array import array
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_ray.errors import CheckpointError
from grpo_ray.storage.records.open_rollouts import (
    FILE_NAME,
    GROUP_TOKENS,
    OpenRollout,
    RolloutKey,
    load_open_rollouts,
    optional_logps,
    prompt_digest,
    save_open_rollouts,
)


def rollout(index: int, source: str = "") -> OpenRollout:
    """Return a completion of two segments."""
    made = OpenRollout(key=RolloutKey(source, "00000000000000aa", 3, index), batch=7, prompt=prompt_digest([1, 2]))
    made.add_segment(5, [10, 11], [-0.1, None], [-0.2, -1.5])
    made.add_segment(6, [12], [-2.0], [-2.5])
    return made


def test_add_segment_appends_tokens_and_version() -> None:
    made = rollout(0)
    assert made.token_ids.tolist() == [10, 11, 12] and made.runs == [(5, 2), (6, 1)] and made.began == 5
    assert optional_logps(made.logps) == [pytest.approx(-0.1), None, -2.0]
    assert OpenRollout(key=made.key, batch=7, prompt="").began == 7


def test_save_open_rollouts_then_load_gives_the_same_bits(tmp_path: Path) -> None:
    saved = [rollout(0), rollout(1, "games"), OpenRollout(key=RolloutKey("", "bb", 0, 0), batch=8, prompt="x")]
    saved[1].finished = True
    saved[1].unprocessed_logps = array("f")
    save_open_rollouts(tmp_path, saved, {"run.seed": 4, "sampling options": {"top_p": "0.9"}})
    loaded, settings = load_open_rollouts(tmp_path)
    assert settings == {"run.seed": 4, "sampling options": {"top_p": "0.9"}}
    for before, after in zip(saved, loaded, strict=True):
        assert (after.key, after.batch, after.prompt) == (before.key, before.batch, before.prompt)
        assert (after.runs, after.finished) == (before.runs, before.finished)
        assert after.token_ids == before.token_ids
        assert after.logps.tobytes() == before.logps.tobytes()  # NaN differs from itself
        assert after.unprocessed_logps.tobytes() == before.unprocessed_logps.tobytes()
    assert math.isnan(loaded[0].logps[1])


def test_load_open_rollouts_of_other_checkpoint_is_empty(tmp_path: Path) -> None:
    save_open_rollouts(tmp_path, [], {})
    assert not (tmp_path / FILE_NAME).exists()
    assert load_open_rollouts(tmp_path) == ([], {})


def test_load_open_rollouts_damaged_raises(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"PAR1 nothing else PAR1")
    with pytest.raises(CheckpointError, match="cannot be read as open rollouts"):
        load_open_rollouts(tmp_path)


def test_load_open_rollouts_with_a_lost_token_raises(tmp_path: Path) -> None:
    save_open_rollouts(tmp_path, [rollout(0)], {})
    table = pq.read_table(tmp_path / FILE_NAME)
    place = table.schema.get_field_index("token_ids")
    short = table.set_column(place, "token_ids", pa.array([[10, 11]], type=pa.list_(pa.int32())))
    pq.write_table(short.replace_schema_metadata(table.schema.metadata), tmp_path / FILE_NAME)
    with pytest.raises(CheckpointError, match="different lengths"):
        load_open_rollouts(tmp_path)


def test_prompt_digest_differs_with_order_and_length() -> None:
    digests = {prompt_digest(ids) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [])}
    assert len(digests) == 5 and all(len(each) == 16 for each in digests)


def test_row_groups_of_long_completions_are_small_enough_to_be_read(tmp_path: Path) -> None:
    length = 1 << 17
    saved = [rollout(index) for index in range(20)]
    for index, each in enumerate(saved):
        each.add_segment(7, range(index, index + length), [-1.0] * length, [-2.0] * length)
    save_open_rollouts(tmp_path, saved, {})
    file = pq.ParquetFile(tmp_path / FILE_NAME)
    rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert sum(rows) == 20 and max(rows) * length <= GROUP_TOKENS
    loaded, _ = load_open_rollouts(tmp_path)
    assert [each.token_ids for each in loaded] == [each.token_ids for each in saved]
    assert [each.runs for each in loaded] == [each.runs for each in saved]
