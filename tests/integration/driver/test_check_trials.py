"""Real trials of `check --attack` and `check --forecast`, each in a run folder of its own."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from holed_rewards import HOLES
from small_runs import rows_of, small_settings

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.data.arithmetic import arithmetic_problems
from grpo_ray.driver.attack import plan_attack, probe_rewards, train_against
from grpo_ray.driver.forecast import forecast
from grpo_ray.driver.launch import UNVERIFIABLE_FILE
from grpo_ray.driver.preflight.audit import audit
from grpo_ray.driver.tables import print_attack, print_forecast, print_probes
from grpo_ray.storage.run_folder import RunFolder


@pytest.fixture
def config_of(cluster: None, policy: Path, tmp_path: Path) -> Callable[..., Config]:
    """Return a function that makes the config of a small run with overrides."""
    return lambda *overrides: load_config(None, [*small_settings("run", tmp_path, policy), *overrides])


@pytest.mark.slow
def test_attack_is_paid_for_length(
    config_of: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("rewards.functions=['holed_rewards:thorough']", "grpo.max_completion_length=32")
    report = train_against(config, plan_attack(config), seconds=10)
    assert report.policy == "tiny-arithmetic" and report.steps >= 5
    assert report.last["reward"] > report.first["reward"] and report.last["length"] > report.first["length"]
    assert report.completions[0].reward > report.first["reward"]
    assert not (tmp_path / "run").exists() and report.folder == str(tmp_path / "run-attack-1")
    assert report.stopped is None and json.dumps(report.to_dict())
    probes = probe_rewards(config, ())
    assert HOLES["thorough"] in {each.name for each in probes[0].holes}
    print_probes(probes)
    print_attack(report)
    printed = capsys.readouterr().out
    assert "one word, 300 times" in printed and report.completions[0].completion[:20] in printed


@pytest.mark.slow
def test_probes_of_a_mixture_are_scored_by_each_source_with_its_own_rewards(
    config_of: Callable[..., Config], tmp_path: Path
) -> None:
    rows = [{"prompt": f"Say {number} words about the sea."} for number in range(40)]
    rows += [{"prompt": "Say 6 words.", "topic": "rain"}] * 2  # a column that no row before has
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own, of_topic = "holed_rewards:concludes", "holed_rewards:of_topic"
    sources = {
        "sums": {"path": "arithmetic", "limit": 100, "rewards": ["correctness"]},
        "chat": {"path": str(file), "rewards": [own, of_topic]},
    }
    config = config_of(f"data.train={json.dumps(sources)}", f"rewards.functions=[correctness, '{own}', '{of_topic}']")
    chat, sums = probe_rewards(config, audit(config, sample=1).columns)
    assert (chat.source, chat.problems, sums.source, sums.problems) == ("chat", 8, "sums", 8)
    assert sums.holes == () and sums.honest[0].reward == 1.0
    assert {each.name for each in chat.holes} >= {HOLES["concludes"], "'hence', from the reward's source"}


def test_forecast_is_that_of_steps_without_learning(
    config_of: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("grpo.max_steps=100", "grpo.save_steps=10")
    never = [problem.id for problem in islice(arithmetic_problems("train"), 2)]  # which check has found
    RunFolder(str(tmp_path), "run").write_json(never, UNVERIFIABLE_FILE)
    found = forecast(config, steps=3)
    assert json.loads((tmp_path / "run-forecast-1" / UNVERIFIABLE_FILE).read_text()) == never
    rows = rows_of(tmp_path / "run-forecast-1")
    assert found.steps == len(rows) == 3 and found.groups == 3 * config.grpo.prompts_per_step
    equal = sum(row["group/equal_share"] for row in rows) / 3
    assert found.signal.value == pytest.approx(1 - equal)
    assert found.hours * 3600 > found.startup_seconds + 100 * found.step_seconds
    assert rows[-1]["heldout/accuracy"] == found.baseline["heldout"].value  # nothing was learned
    assert [file.name for file in (tmp_path / "run").iterdir()] == [UNVERIFIABLE_FILE]
    print_forecast(found, config)
    assert "a gain below" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("reward", HOLES)
def test_attack_of_two_minutes_finds_the_hole(config_of: Callable[..., Config], reward: str) -> None:
    """The hole is found by a probe; training finds it too where a small policy can write what is paid."""
    config = config_of(f"rewards.functions=['holed_rewards:{reward}']", "grpo.max_completion_length=128")
    (probes,) = probe_rewards(config, ())
    assert HOLES[reward] in {each.name for each in probes.holes}
    report = train_against(config, plan_attack(config), seconds=120)
    shown: dict[str, Any] = {"steps": report.steps, "first": report.first, "last": report.last}
    print(reward, json.dumps(shown), [each.completion[:100] for each in report.completions[:3]])
    # The word is beyond a policy that writes sums; no reward falls.
    assert report.last["reward"] > report.first["reward"] or reward == "concludes"
