"""Tests of the audit on a Ray cluster: its report of small files, of a real dataset, and its errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import short_warm_up

from grpo_ray.config.loader import load_config
from grpo_ray.data.files import file_shards
from grpo_ray.data.problem import parse_problem
from grpo_ray.data.stream import Split
from grpo_ray.driver.preflight.audit import AuditReport, audit, is_sampled, measure_shard
from grpo_ray.driver.tables import print_audit
from grpo_ray.errors import ConfigError, DataError, RewardError
from grpo_ray.models.memory import GPU_CARDS

PROSE = "Every such prime divides the sum of all the others, so there are none"
TRAIN = [
    {"prompt": "half?", "solution": "$0.5$", "topic": "a"},
    {"prompt": "half again?", "solution": "$\\frac{1}{2}$", "topic": "a"},
    {"prompt": "why?", "solution": PROSE, "topic": "b"},
    {"prompt": "half?", "solution": "$0.5$", "topic": "a"},  # a duplicate of the first row
    {"prompt": "long " * 30, "solution": "$7$", "topic": "b"},
]
HELDOUT = [{"prompt": "half?", "solution": "$0.5$"}, {"prompt": "new?", "solution": "$8$"}]


def id_of(row: dict[str, str]) -> str:
    return parse_problem(row, where="here").id


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def overrides(cluster: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of training problems, so that there are two shards, and one of held-out problems."""
    folder = tmp_path_factory.mktemp("problems")
    (folder / "train").mkdir()
    write(folder / "train" / "1.jsonl", TRAIN[:2])
    write(folder / "train" / "2.jsonl", TRAIN[2:])
    heldout = write(folder / "heldout.jsonl", HELDOUT)
    return [f"model.path={policy}", f"data.train={folder}/train", f"data.heldout={heldout}"]


@pytest.fixture(scope="module")
def phases() -> list[str]:
    """Phases that the audit announced while `report` was made."""
    return []


@pytest.fixture(scope="module")
def report(overrides: list[str], phases: list[str]) -> AuditReport:
    """Report of all rows."""
    config = load_config(None, [*overrides, "engine.max_model_len=64", "grpo.max_completion_length=40"])
    return audit(config, on_progress=phases.append)


def test_audit_counts_rows_and_duplicates(report: AuditReport, phases: list[str]) -> None:
    training = report.training
    assert (training.problems, training.verified, training.boxed, training.formula) == (5, 5, 4, 4)
    assert (training.duplicates, training.duplicate_ids) == (1, (id_of(TRAIN[0]),))
    (heldout,) = report.heldout.values()
    assert heldout.problems == 2 and heldout.topics == {}
    assert report.heldout_in_training == {"heldout": 1}  # whatever other columns it has there
    assert phases[-1] == "verifying the held-out solutions"


def test_audit_names_unverifiable_and_ambiguous_rows(report: AuditReport) -> None:
    training = report.training
    assert [(row.id, row.reason) for row in training.unverifiable] == [(id_of(TRAIN[2]), "cannot be parsed")]
    assert report.unverifiable_ids == [id_of(TRAIN[2])]
    # Rows 1 and 2 have equal solutions in different words; the last row of a shard is paired with the one before it.
    assert {row.id for row in training.fooled} == {id_of(TRAIN[0]), id_of(TRAIN[1])} and training.probes == 5


def test_audit_counts_kinds_and_topics(report: AuditReport) -> None:
    training = report.training
    assert {kind: row.problems for kind, row in training.kinds.items()} == {"number": 3, "fraction": 1, "text": 1}
    assert {topic: (row.problems, row.verified) for topic, row in training.topics.items()} == {"a": (3, 3), "b": (2, 1)}


def test_audit_measures_prompts_rewards_and_memory(report: AuditReport) -> None:
    lengths = report.training.lengths
    assert lengths.limit == 24 and lengths.max > 24 and lengths.over_limit == 1
    assert [row.id for row in report.training.overlong] == [id_of(TRAIN[4])]
    (run,) = report.rewards
    assert (run.reward, run.right, run.wrong) == ("correctness", (1.0, 1.0, None), (1.0, 0.0, None))
    assert [each.card for each in report.memory] == list(GPU_CARDS)
    assert all(each.plan.fits and each.plan.estimate.parameters > 100_000 for each in report.memory)


def test_audit_report_is_printed_and_becomes_json(report: AuditReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(json.dumps(report.to_dict()))["unverifiable_ids"] == report.unverifiable_ids
    print_audit(report, load_config())
    printed = capsys.readouterr().out
    expected = (id_of(TRAIN[2]), "cannot be parsed", "engine.gpu_memory_utilization=0.3", "completions at once")
    assert [text for text in expected if text not in printed] == []


def test_audit_limit_and_format_reward_exclude_nothing(overrides: list[str]) -> None:
    settings = [*overrides, "data.limit=4", "rewards.functions=[boxed_format]"]
    report = audit(load_config(None, [*settings, "heldout.score=correctness"]))
    # The limit takes the first problems of all shards together.
    assert (report.training.problems, report.training.verified, report.training.duplicates) == (4, 4, 1)
    assert [row.id for row in report.training.unverifiable] == [id_of(TRAIN[2])]
    assert report.unverifiable_ids == []  # without the correctness reward any problem can be rewarded
    assert report.rewards[0].right == report.rewards[0].wrong == (1.0, 1.0, 1.0)
    assert audit(load_config(None, settings)).training.verified == 0  # nothing reads the solutions


def test_audit_sample_reads_all_and_verifies_some(overrides: list[str]) -> None:
    sampled = [row for row in TRAIN if is_sampled(id_of(row), 2 / 5)]
    report = audit(load_config(None, overrides), sample=2)
    assert report.training.problems == 5 and report.training.verified == len(sampled) < 5


def test_audit_bad_row_is_named(overrides: list[str], tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", TRAIN[:2])
    write(tmp_path / "2.jsonl", [*TRAIN[2:], {"prompt": "no solution"}])
    with pytest.raises(DataError, match=r"2\.jsonl, row 4: no column 'solution'"):
        audit(load_config(None, [*overrides, f"data.train={tmp_path}"]))


def test_audit_reserved_column_in_some_row_is_named(overrides: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "1.jsonl", [*TRAIN, {"prompt": "who?", "solution": "me", "images": None}])
    with pytest.raises(DataError, match=r"1\.jsonl, row 6: column 'images' cannot be passed to rewards"):
        audit(load_config(None, [*overrides, f"data.train={path}"]))


def test_audit_reward_gets_columns_that_first_rows_lack(overrides: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "1.jsonl", [*TRAIN, {"prompt": "who?", "solution": "me", "rare": [1]}])
    report = audit(
        load_config(None, [*overrides, f"data.train={path}", "rewards.functions=['reward_spies:reads_rare']"])
    )
    assert report.rewards[0].right == (0.0, 0.0, 0.0)


def test_audit_overlong_prompt_with_error_is_refused(overrides: list[str]) -> None:
    with pytest.raises(DataError, match=rf"1 of 5 training problems, .* than 24 tokens .*: {id_of(TRAIN[4])}"):
        audit(load_config(None, [*overrides, "data.max_prompt_length=24", "data.overlong_prompts=error"]))


def test_audit_failing_reward_is_named(overrides: list[str], tmp_path: Path) -> None:
    settings = f"rewards.settings={{'reward_spies:fail_once': {{step: 0, mark: {tmp_path}/mark}}}}"
    config = load_config(None, [*overrides, "rewards.functions=['reward_spies:fail_once']", settings])
    with pytest.raises(RewardError, match=r"'reward_spies:fail_once' fails .*RuntimeError: broken on purpose"):
        audit(config)


def test_audit_real_dataset_sample_verifies(cluster: None, policy: Path, real_problems: Callable[[str], Path]) -> None:
    path = real_problems("olympiadbench.jsonl")
    report = audit(load_config(None, [f"model.path={policy}", f"data.train={path}"]), sample=100)
    (heldout,) = report.heldout.values()
    assert heldout.is_part_of_training and heldout.problems > 0
    assert report.training.problems + heldout.problems == 675 and 60 < report.training.verified < 140
    assert report.unverifiable_ids == []


@pytest.fixture(scope="module")
def games(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run with an environment that each problem names."""
    folder = tmp_path_factory.mktemp("games")
    rows = [{"prompt": f"game {number}", "environment": "game"} for number in range(3)]
    return [
        f"model.path={short_warm_up('tiny-guess', folder / 'policy', 1)}",
        f"data.train={write(folder / 'train.jsonl', rows)}",
        f"data.heldout={write(folder / 'heldout.jsonl', rows[:1])}",
        "rollout.environment={game: grpo_ray.tools.examples:Guess}",
        "rewards.functions=[environment]",
    ]


def test_audit_of_an_environment_shows_its_trial_and_no_solutions(
    games: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, games)
    report = audit(config)
    print_audit(report, config)
    printed = capsys.readouterr().out
    assert report.tools is not None and [each.name for each in report.tools.trials][:2] == ["reset of game"] * 2
    assert "reset of game" in printed and "solutions" not in printed and "can never be rewarded" not in printed


@pytest.mark.parametrize("wrong", ["train", "heldout"])
def test_audit_wrong_environment_of_any_row_is_named(games: list[str], tmp_path: Path, wrong: str) -> None:
    rows = [{"prompt": "game 0", "environment": "game"}, {"prompt": "game 3", "environment": "gmae"}]
    file = write(tmp_path / f"{wrong}.jsonl", rows)
    with pytest.raises(DataError, match=rf"{wrong}\.jsonl, row 2 has environment='gmae', and .* has game"):
        audit(load_config(None, [*games, f"data.{wrong}={file}"]))


def test_audit_policy_without_chat_template_counts_plain_text(cluster: None, policy: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    plain = tmp_path / "policy"
    shutil.copytree(policy, plain, ignore=shutil.ignore_patterns("chat_template.jinja"))
    tokenizer = AutoTokenizer.from_pretrained(plain)
    assert tokenizer.chat_template is None
    (shard,) = file_shards(str(write(tmp_path / "two.jsonl", HELDOUT)))
    found = measure_shard(load_config(None, [f"model.path={plain}"]), Split("two", ()), shard)
    assert found.lengths.tolist() == [len(tokenizer(row["prompt"])["input_ids"]) for row in HELDOUT]
    with pytest.raises(ConfigError, match="has no chat template, which completions of several turns need"):
        audit(load_config(None, [f"model.path={plain}", "rollout.tools=['grpo_ray.tools.python_tool:python']"]))


def test_measure_shard_counts_tokens_of_policy(policy: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (shard,) = file_shards(str(write(tmp_path / "two.jsonl", HELDOUT)))
    found = measure_shard(load_config(None, [f"model.path={policy}"]), Split("two", ()), shard)
    assert [f"{number:016x}" for number in found.ids.tolist()] == [id_of(row) for row in HELDOUT]
    assert found.columns == () and found.shard_sizes == [2]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    # The tokens of the text, and the marks of the user, the end and the assistant.
    assert found.lengths.tolist() == [len(tokenizer(row["prompt"])["input_ids"]) + 3 for row in HELDOUT]
