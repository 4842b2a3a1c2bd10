import pytest

from grpo_ray.errors import RewardError
from grpo_ray.rewards import accuracy_reward, start_judging
from grpo_ray.rewards.accuracy import Judge, shared_judge
from grpo_ray.rewards.pool import VerifierPool


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_plain_and_conversational_completions_earn_the_same() -> None:
    texts = [r"\boxed{\frac12}", r"\boxed{2}", r"\boxed{5}"]
    solutions = ["$0.5$", "$0.5$", ""]
    expected = [1.0, 0.0, None]
    assert accuracy_reward(texts, solutions) == expected
    assert accuracy_reward([chat(text) for text in texts], solutions, prompts=["p"] * 3, step=4) == expected


def test_metrics_tell_limits_and_unscorable_solutions_apart() -> None:
    logged: dict[str, float] = {}
    accuracy_reward([r"\boxed{1}"] * 4, ["$1$", "$2$", "", ""], log_metric=logged.__setitem__)
    assert logged == {"reward/verifier_timeouts": 0.0, "reward/unscorable_share": 0.5}  # 2 of 4


def test_boolean_problems_can_be_dropped_whole_groups_at_a_time() -> None:
    completions = [r"\boxed{Yes}", r"\boxed{No}", r"\boxed{1}"]
    solutions = ["Yes", "Yes", "$1$"]
    assert accuracy_reward(completions, solutions) == [1.0, 0.0, 1.0]
    assert accuracy_reward(completions, solutions, boolean_share=0.0) == [None, None, 1.0]
    prompts = [f"Is {number} prime?" for number in range(40) for _ in range(2)]
    rewards = accuracy_reward([r"\boxed{Yes}"] * 80, ["Yes"] * 80, boolean_share=0.5, prompts=prompts)
    groups = [set(rewards[start : start + 2]) for start in range(0, 80, 2)]
    assert all(group in ({1.0}, {None}) for group in groups)
    assert 8 <= sum(group == {1.0} for group in groups) <= 32  # 20 of 40, give or take a fixed choice


def test_a_share_that_cannot_work_is_refused() -> None:
    with pytest.raises(RewardError, match="0 to 1"):
        accuracy_reward([r"\boxed{Yes}"], ["Yes"], boolean_share=2.0)
    with pytest.raises(RewardError, match="prompts"):
        accuracy_reward([r"\boxed{Yes}"], ["Yes"], boolean_share=0.5)


def test_judging_that_began_early_is_not_done_twice() -> None:
    judge = shared_judge()
    accuracy_reward([r"\boxed{1}"], ["$1$"])
    start_judging(chat(r"early: \boxed{77}"), "$77$")
    judge.start(r"early: \boxed{77}", "$77$").result()
    judged = sum(judge.pool.counts.values())
    assert accuracy_reward([r"early: \boxed{77}"], ["$77$"]) == [1.0]
    assert sum(judge.pool.counts.values()) == judged


def test_a_pair_is_remembered_by_both_texts() -> None:
    with VerifierPool(processes=1) as pool:
        judge = Judge(pool)
        # The same characters, cut elsewhere, are another pair.
        verdicts = judge.verdicts([r"\boxed{1}$", r"\boxed{1}"], ["1$", "$1$"])
        assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
        assert pool.counts["ok"] == 2
