"""Columns of a dataset on their way from a file to a reward, or their refusal."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings
from scripted_tools import tool_tokenizer
from transformers import TrainerState

from grpo_ray.data.files import file_shards
from grpo_ray.data.problem import RESERVED_COLUMNS
from grpo_ray.data.stream import Split, build_index, from_row, to_row
from grpo_ray.errors import DataError
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.group_batches import GroupBatches
from grpo_ray.learner.rollouts.rollout import Completions
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.rewards.registry import TRL_ARGUMENTS, ConfiguredReward, load_reward
from grpo_ray.telemetry.profiler import PhaseProfiler

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text(max_size=6) | st.sampled_from(
    ["id", "epoch", "index", "name", "function", "settings", "inputs", "row", "topic", "args", "kwargs", "chosen",
     "messages", "tools", "environment", "chat_template_kwargs", "strict", "credit", *RESERVED_COLUMNS]
)  # fmt: skip
ROWS = st.lists(
    st.dictionaries(NAMES.filter(lambda name: name not in ("prompt", "solution")), JSON, max_size=4),
    min_size=1,
    max_size=4,
)
"""Further columns of each row of a file."""

TOKENIZER = tool_tokenizer("tiny-arithmetic")


def scorer(*rewards: Any) -> Scorer:
    """Return the scorer of some reward functions on one worker."""
    return Scorer(
        rewards=[Reward(reward.__name__, reward) for reward in rewards], functions=(), tokenizer=TOKENIZER,
        workers=Workers(gather_objects=lambda own: [own]), profiler=PhaseProfiler(), state=TrainerState,
        notify=lambda line: None,
    )  # fmt: skip


def completed(texts: Sequence[str]) -> Completions:
    """Return completions of some texts."""
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    return Completions([[5]] * len(ids), ids, [[0.0] * len(each) for each in ids])


def rows_of_learner(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write the rows to a file, and return the rows for one completion of each problem."""
    lines = (json.dumps({**row, "prompt": f"{n}?", "solution": "1"}) + "\n" for n, row in enumerate(rows))
    path.write_text("".join(lines))
    index = build_index(Split("some", file_shards(str(path))))
    problems = [(from_row(to_row(problem, epoch=2)), 2) for problem in index.split.read()]
    return next(iter(GroupBatches(problems, len(rows), num_generations=1, repeats=1)))


def received(inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keyword arguments of a reward that is called for these rows, as in a run."""
    found: dict[str, Any] = {}

    def spy(**kwargs: Any) -> list[float]:
        found.update(kwargs)
        return [0.0] * len(inputs)

    scorer(ConfiguredReward("spy", spy, {})).score(inputs, completed(["7"] * len(inputs)))
    return found


@pytest.mark.long
@given(rows=ROWS)
@example(rows=[{"id": "a"}, {}])
@example(rows=[{}, {"index": [1], "epoch": None}])
@example(rows=[{"topic": 1}, {"topic": "t"}, {"topic": [{"a": None}]}])
@example(rows=[{}, {"images": None}])
@example(rows=[{"completions": 1}])
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_reward_any_column_arrives_unchanged_or_row_is_refused(rows: list[dict[str, Any]]) -> None:
    refused = [number for number, row in enumerate(rows, start=1) if RESERVED_COLUMNS.keys() & row.keys()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "some.jsonl")
        if refused:
            with pytest.raises(DataError, match=rf"some\.jsonl, row {refused[0]}: column '"):
                rows_of_learner(path, rows)
            return
        arguments = received(rows_of_learner(path, rows))
    for name in set().union(*rows):
        assert arguments[name] == [row.get(name) for row in rows]
        # 1, 1.0 and True are equal, but not the same value.
        assert [repr(value) for value in arguments[name]] == [repr(row.get(name)) for row in rows]


def test_reserved_columns_are_those_that_trl_passes_to_rewards(tmp_path: Path) -> None:
    arguments = received(rows_of_learner(tmp_path / "a.jsonl", [{}]))
    passed = arguments.keys() - {"solution", "id", "epoch", "index"}
    assert passed == TRL_ARGUMENTS and passed <= RESERVED_COLUMNS.keys()


def test_reward_column_with_the_name_of_a_setting_is_ignored(tmp_path: Path) -> None:
    inputs = rows_of_learner(tmp_path / "a.jsonl", [{"credit": "ten", "strict": 0, "max_penalty": None}])
    rewards = [load_reward(name) for name in ("tag_format", "repetition_penalty", "correctness")]
    scores = scorer(*rewards).score(inputs, completed(["\\boxed{1}"]))
    assert scores.own.tolist() == [[0.0, 0.0, 1.0]]
