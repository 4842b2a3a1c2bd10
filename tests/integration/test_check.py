import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_ray.check import (
    Lengths,
    Piece,
    check,
    is_chosen,
    measure_shard,
    policy_files,
    print_report,
    summarise_lengths,
)
from grpo_ray.data.files import file_shards
from grpo_ray.data.stream import Split
from grpo_ray.errors import ConfigError, DataError, RewardError
from grpo_ray.problem import problem_id
from grpo_ray.settings import load

PROSE = "Every such prime divides the sum of all the others, so there are none"
TRAIN = [
    {"prompt": "half?", "solution": "$0.5$", "topic": "a"},
    {"prompt": "half again?", "solution": "$\\frac{1}{2}$", "topic": "a"},
    {"prompt": "why?", "solution": PROSE, "topic": "b"},
    {"prompt": "half?", "solution": "$0.5$", "topic": "a"},  # says the first row again
    {"prompt": "long " * 30, "solution": "$7$", "topic": "b"},
]
HELDOUT = [{"prompt": "half?", "solution": "$0.5$"}, {"prompt": "new?", "solution": "$8$"}]


def id_of(row: dict[str, str]) -> str:
    return problem_id([{"role": "user", "content": row["prompt"]}], row["solution"])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def overrides(cluster: None, policy: Path, tmp_path: Path) -> list[str]:
    """Two files of training problems (so two shards) and one of held-out ones."""
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "1.jsonl", TRAIN[:2])
    write(tmp_path / "train" / "2.jsonl", TRAIN[2:])
    heldout = write(tmp_path / "heldout.jsonl", HELDOUT)
    return [f"model.path={policy}", f"data.train={tmp_path}/train", f"data.heldout={heldout}"]


def test_everything_worth_knowing_is_found(overrides, capsys):
    said: list[str] = []
    report = check(load(None, [*overrides, "engine.max_context=64", "grpo.max_completion_length=40"]), say=said.append)
    training = report.training
    assert (training.problems, training.verified, training.boxed, training.formula) == (5, 5, 4, 4)
    assert (training.duplicates, training.duplicate_ids) == (1, (id_of(TRAIN[0]),))
    assert [(row.id, row.reason) for row in training.unverifiable] == [(id_of(TRAIN[2]), "not understood")]
    assert report.unverifiable_ids == [id_of(TRAIN[2])]
    # Rows 1 and 2 state one half in different words; the last row of a shard is given the one before it.
    assert {row.id for row in training.fooled} == {id_of(TRAIN[0]), id_of(TRAIN[1])} and training.probes == 5
    assert {kind: row.problems for kind, row in training.kinds.items()} == {"number": 3, "fraction": 1, "text": 1}
    assert {topic: (row.problems, row.verified) for topic, row in training.topics.items()} == {"a": (3, 3), "b": (2, 1)}
    assert training.lengths.limit == 24 and training.lengths.max > 24
    assert training.lengths.over_limit >= 1
    assert report.heldout.problems == 2 and report.heldout.topics == {}
    assert report.heldout_in_training == 1
    (run,) = report.rewards
    assert (run.reward, run.right, run.wrong) == ("correctness", (1.0, 1.0, None), (1.0, 0.0, None))
    assert report.memory.parameters > 100_000 and report.memory.kv_cache > 0
    assert said[-1] == "holding the held-out solutions against themselves"
    assert json.loads(json.dumps(report.to_dict()))["unverifiable_ids"] == report.unverifiable_ids
    print_report(report)
    shown = capsys.readouterr().out
    assert id_of(TRAIN[2]) in shown and "not understood" in shown and "engine.memory_share on 24 GiB" in shown


def test_a_limit_takes_the_first_problems_of_all_shards_together(overrides):
    report = check(load(None, [*overrides, "data.limit=3"]))
    assert (report.training.problems, report.training.verified, report.training.duplicates) == (3, 3, 0)
    assert report.unverifiable_ids == [id_of(TRAIN[2])]


def test_a_sample_verifies_some_but_reads_all(overrides):
    chosen = [row for row in TRAIN if is_chosen(id_of(row), 2 / 5)]
    report = check(load(None, overrides), sample=2)
    assert report.training.problems == 5 and report.training.verified == len(chosen) < 5


def test_nothing_is_left_out_where_correctness_is_not_paid_for(overrides):
    report = check(load(None, [*overrides, "rewards.functions=[boxed_format]"]))
    assert len(report.training.unverifiable) == 1 and report.unverifiable_ids == []
    assert report.rewards[0].right == report.rewards[0].wrong == (1.0, 1.0, 1.0)


def test_the_first_bad_row_is_named(overrides, tmp_path):
    write(tmp_path / "train" / "2.jsonl", [*TRAIN[2:], {"prompt": "no solution"}])
    with pytest.raises(DataError, match=r"2\.jsonl, row 4: no column 'solution'"):
        check(load(None, overrides))


def test_a_reward_that_fails_is_named_with_its_own_words(overrides, tmp_path):
    settings = f"rewards.settings={{'reward_spies:fail_once': {{step: 0, mark: {tmp_path}/mark}}}}"
    config = load(None, [*overrides, "rewards.functions=['reward_spies:fail_once']", settings])
    with pytest.raises(RewardError, match=r"'reward_spies:fail_once' fails .*RuntimeError: broken on purpose"):
        check(config)


def test_a_sample_of_none_is_refused():
    with pytest.raises(ConfigError, match="sample=0"):
        check(load(), sample=0)


def test_a_real_dataset_verifies_against_itself(cluster, policy, real_problems):
    path = real_problems("olympiadbench.jsonl")
    report = check(load(None, [f"model.path={policy}", f"data.train={path}", "data.heldout_limit=8"]), sample=100)
    assert report.training.problems == 675 and 60 < report.training.verified < 140
    assert report.unverifiable_ids == []


# The parts


def test_lengths_are_summed_up_by_nearest_rank():
    lengths = np.arange(1, 101, dtype=np.uint32)  # 1 to 100
    # The context of 96 holds a completion of 6 behind 90 tokens: 91 to 100 exceed that, and 96 to 100 fill it alone.
    assert summarise_lengths(lengths, 96, 6) == Lengths(50, 90, 99, 100, limit=90, over_limit=10, over_context=5)
    assert summarise_lengths(np.array([7], np.uint32), 10, 20) == Lengths(7, 7, 7, 7, 0, 1, 0)


def test_a_sample_is_a_share_of_the_problems_and_ignores_what_is_held_out():
    ids = [f"{n * 2**54:016x}" for n in range(1024)]  # evenly over all ids
    assert sum(is_chosen(each, 0.25) for each in ids) == pytest.approx(256, abs=16)
    lowest = [f"{n * 2**44:016x}" for n in range(1024)]  # the lowest thousandth, as data.heldout_share cuts it off
    assert sum(is_chosen(each, 0.25) for each in lowest) == pytest.approx(256, abs=16)
    assert all(is_chosen(each, 1.0) for each in [*ids, "f" * 16]) and not any(is_chosen(each, 0.0) for each in ids)


@pytest.mark.parametrize(
    ("start", "stop", "pairs"),
    [(0, 2, [("0", "1"), ("1", "2")]), (2, 4, [("2", "3"), ("3", "2")]), (0, 4, [*zip("0123", "1232", strict=True)])],
)
def test_a_problems_neighbour_is_the_next_row_even_in_the_next_piece(tmp_path, start, stop, pairs):
    rows = [{"prompt": f"{n}?", "solution": str(n)} for n in range(4)]
    (shard,) = file_shards(str(write(tmp_path / "four.jsonl", rows)))
    piece = Piece(Split("four", ()), shard, start, stop, share=1.0)
    assert [(one.solution, other.solution) for one, other in piece.pairs()] == pairs


def test_a_single_problem_is_its_own_neighbour(tmp_path):
    (shard,) = file_shards(str(write(tmp_path / "one.jsonl", HELDOUT[:1])))
    ((one, other),) = Piece(Split("one", ()), shard, 0, 1, share=1.0).pairs()
    assert one == other


def test_prompts_are_counted_as_the_policy_reads_them(policy, tmp_path):
    from transformers import AutoTokenizer

    (shard,) = file_shards(str(write(tmp_path / "two.jsonl", HELDOUT)))
    ids, lengths = measure_shard(load(None, [f"model.path={policy}"]), Split("two", ()), shard)
    assert [f"{number:016x}" for number in ids.tolist()] == [id_of(row) for row in HELDOUT]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    # The text's own tokens, and the marks of the user, the end and the assistant.
    assert lengths.tolist() == [len(tokenizer(row["prompt"])["input_ids"]) + 3 for row in HELDOUT]


def test_a_policys_files_are_fetched_without_its_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 8)
    folder = Path(policy_files(load(None, [f"model.path=file://{tmp_path}"])))
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_a_policy_without_a_chat_template_is_refused(cluster, policy, tmp_path):
    for file in policy.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no chat template"):
        check(load(None, [f"model.path={tmp_path}"]))
