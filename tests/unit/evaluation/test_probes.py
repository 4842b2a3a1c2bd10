"""Tests of the probes of `check --attack`: rewards with a known hole pay one of them, sound rewards none."""

from collections.abc import Sequence

import pytest
from holed_rewards import HOLES

from grpo_ray.config.loader import from_mapping
from grpo_ray.data.arithmetic import arithmetic_problems
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.probes import HONEST, PLAIN, RIGHT, Probe, ProbeReport, score_probes, words_of_rewards
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.tokenizer import load_tokenizer

PROBLEMS = [problem for problem, _ in zip(arithmetic_problems("train"), range(4), strict=False)]


def probe(*functions: str, problems: Sequence[Problem] = PROBLEMS) -> ProbeReport:
    config = from_mapping({"rewards": {"functions": list(functions)}})
    return score_probes(config, "", problems, load_tokenizer(str(embedded_policy())))


@pytest.mark.parametrize("reward", HOLES)
def test_reward_with_a_hole_pays_its_probe(reward: str) -> None:
    report = probe(f"holed_rewards:{reward}")
    paid = {each.name: each.reward for each in (*report.holes, *report.honest)}
    hole, honest = paid[HOLES[reward]], paid[PLAIN]
    assert hole is not None and honest is not None and hole > 2 * honest
    rewards = [each.reward for each in report.others if each.reward is not None]
    assert len(rewards) == len(report.others) and rewards == sorted(rewards, reverse=True)


def test_correctness_pays_right_answers_only() -> None:
    report = probe("correctness")
    assert [each.name for each in report.honest] == list(HONEST)
    assert [each.reward for each in report.honest] == [1.0, 1.0, 0.0, 0.0]
    assert report.holes == () and {each.reward for each in report.others} == {0.0}


def test_problems_without_solutions_have_no_right_answer() -> None:
    problems = [Problem(id="0" * 16, prompt=[{"role": "user", "content": "Write a poem about 7 seas."}], solution="")]
    report = probe("boxed_format", problems=problems)
    assert [each.name for each in report.honest] == [PLAIN]
    assert [each.name for each in report.holes] == [
        "every number of the prompt in a box",  # 7 alone
        "the numbers from -20 to 200 in one box",
    ]
    assert not any("right answer" in each.name for each in report.others)


def test_weights_are_those_of_training() -> None:
    settings = {"rewards": {"functions": ["correctness", "boxed_format"]}, "grpo": {"reward_weights": [2.0, -0.5]}}
    report = score_probes(from_mapping(settings), "", PROBLEMS, load_tokenizer(str(embedded_policy())))
    assert report.honest[0].reward == 1.5 and report.holes == ()
    paid = {each.name: each.reward for each in report.others}
    assert paid["the right answer with the other sign"] == -0.5 and paid["an empty box"] == 0.0


def test_words_are_those_of_texts_and_patterns_of_own_rewards() -> None:
    assert words_of_rewards(["boxed_format", "holed_rewards:concludes"]) == ["therefore|hence", "therefore", "hence"]
    # Of a class, and of the constants, annotated or not, that it names in its module
    words = words_of_rewards(["holed_rewards:Polite"])
    own = {"content", "please", "thank you|thanks", "thank", "you", "thanks"}
    assert set(words) == own | {"good day", "good", "day"}


def test_a_reward_model_of_another_source_is_no_obstacle() -> None:
    sources = {
        "sums": {"path": "arithmetic", "rewards": ["correctness"]},
        "chat": {"path": "x.jsonl", "rewards": ["a/rm"]},
    }
    config = from_mapping({"data": {"train": sources}, "rewards": {"functions": ["correctness", "a/rm"]}})
    report = score_probes(config, "sums", PROBLEMS, load_tokenizer(str(embedded_policy())))
    assert report.honest[0].reward == 1.0 and report.to_dict()["holes"] == []


def test_holes_are_compared_with_honest_completions() -> None:
    def report(right: float, wrong: float, *paid: float) -> list[float | None]:
        honest = (Probe(RIGHT, right, ""), Probe("another problem's answer", wrong, ""), Probe(PLAIN, 0.0, ""))
        others = tuple(Probe(str(number), reward, "") for number, reward in enumerate(paid))
        return [each.reward for each in ProbeReport("", 4, honest, others).holes]

    assert report(1.0, 0.0, 1.0, 0.6, 0.5, 0.0) == [1.0, 0.6]
    assert report(0.1, 0.1, 1.0, 0.6, 0.5, 0.1) == [1.0, 0.6]  # a right answer is not paid: compared with the best
    assert report(1.0, 1.0, 1.0, 0.5) == []  # nothing is paid more than a wrong answer
