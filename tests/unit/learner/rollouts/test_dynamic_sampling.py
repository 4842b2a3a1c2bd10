"""Choice of the groups with signal, their assignment to workers, and the padding of rows of several rounds."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.dynamic_sampling import (
    DynamicSampler,
    assign_groups,
    choose_groups,
    divide_groups,
    has_signal,
    join_rows,
    rewards_differ,
)
from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Rollout

quick = settings(max_examples=100, deadline=None, derandomize=True)


def rows(prompts: list[list[int]], completions: list[list[int]]) -> Rollout:
    """Make rows of the given token ids; the importance ratio of a token is a tenth of its id, and 1 on padding."""

    def padded(lists: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, lists))
        filled = [[0] * (width - len(each)) + each if left else each + [0] * (width - len(each)) for each in lists]
        return torch.tensor(filled), (torch.tensor(filled) != 0).long()

    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(completions, left=False)
    output = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "importance_sampling_ratio": (completion_ids / 10.0).where(completion_mask.bool(), 1.0),
        "advantages": torch.ones(len(prompts)), "num_items_in_batch": torch.tensor(99),
    }  # fmt: skip
    return Rollout([{}] * len(prompts), completions, torch.ones(len(prompts), 1), output)


# rewards_differ and has_signal


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((0.7, 0.1 + 0.2 + 0.4), False),  # 0.7000000000000001
        ((math.nan, 1.0), False),  # a single reward cannot be compared with another
        ((math.nan, 1.0, 0.0), True),
        ((math.nan, math.nan), False),
        ((1000.0, 1000.0001), False),
        ((0.0, 1e-3), True),
    ],
)
def test_rewards_differ_worked_examples(rewards: tuple[float, ...], expected: bool) -> None:
    assert rewards_differ(rewards) == expected


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), max_size=5), st.randoms())
@quick
def test_rewards_differ_ignores_order_and_nan(rewards: list[float], draw: Any) -> None:
    known = [reward for reward in rewards if not math.isnan(reward)]
    assert rewards_differ(rewards) == rewards_differ(draw.sample(rewards, len(rewards))) == (len(set(known)) > 1)


def test_has_signal_no_token_counts_false() -> None:
    group = rows([[5], [5]], [[1, 2], [3, 4]])
    group.rewards[0], group.batch["advantages"] = 0.0, torch.tensor([-1.0, 1.0])
    assert has_signal(group, torch.ones(1), 2) == [True]
    group.batch["completion_mask"][:] = 0  # both were truncated, and TRL masks them
    assert has_signal(group, torch.ones(1), 2) == [False]


def test_has_signal_one_value_for_each_group() -> None:
    groups = rows([[5]] * 4, [[1, 2]] * 4)
    groups.rewards[2] = 0.0
    assert has_signal(groups, torch.ones(1), 2) == [False, True]


# choose_groups and assign_groups


def test_choose_groups_signal_first_then_fillers_in_order_drawn() -> None:
    signal = [[[False, True], [False, False]], [[True, False], [True, True]]]  # two rounds of two workers
    assert choose_groups(signal, 4) == ([(0, 0, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)], [])
    assert choose_groups(signal, 3) == ([(0, 0, 1), (1, 0, 0), (1, 1, 0)], [])
    assert choose_groups([signal[0]], 4) == ([(0, 0, 1)], [(0, 0, 0), (0, 1, 0), (0, 1, 1)])


def test_choose_groups_of_several_steps_follow_the_order_drawn() -> None:
    # Two workers with a group in each of two steps: the order is 0/0, 1/0, 0/1, 1/1.
    signal = [[[True, True], [False, True]], [[True, False], [True, False]]]
    assert choose_groups(signal, 4, parts=2) == ([(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)], [])
    assert choose_groups(signal[:1], 4, parts=2) == ([(0, 0, 0), (0, 0, 1), (0, 1, 1)], [(0, 1, 0)])


def test_divide_groups_each_step_gets_as_many_with_signal() -> None:
    chosen, fillers = [(0, 0, 0), (0, 0, 2), (1, 0, 1)], [(0, 0, 1), (0, 0, 3), (0, 0, 4)]
    assert divide_groups(chosen, fillers, 1) == [(chosen, fillers)]
    assert divide_groups(chosen, fillers, 2) == [(chosen[:2], fillers[:1]), (chosen[2:], fillers[1:])]
    assert divide_groups(chosen, fillers, 3) == [
        ([group], [filler]) for group, filler in zip(chosen, fillers, strict=True)
    ]
    assert divide_groups(chosen[:1], fillers, 2) == [(chosen[:1], fillers[:1]), ([], fillers[1:])]


def test_assign_groups_worked_examples() -> None:
    chosen = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 1)]
    assert assign_groups(chosen, [], [2, 2]) == [[(0, 0, 0), (0, 0, 1)], [(1, 0, 0), (1, 1, 1)]]
    # Two of the first worker's have signal: each worker trains on one of them, and on a filler.
    assert assign_groups(chosen[:2], [(0, 1, 0), (0, 1, 1)], [2, 2]) == [[(0, 0, 0), (0, 1, 1)], [(0, 0, 1), (0, 1, 0)]]


@st.composite
def drawn_rounds(draw: st.DrawFn) -> tuple[int, int, list[list[list[bool]]]]:
    """Draw a number of workers, groups of each in a round, and whether each group of each round has signal."""
    workers, share = draw(st.sampled_from([(1, 4), (2, 3), (3, 2), (4, 1)]))
    groups = st.lists(st.booleans(), min_size=share, max_size=share)
    a_round = st.lists(groups, min_size=workers, max_size=workers)
    return workers, share, draw(st.lists(a_round, min_size=1, max_size=4))


@given(drawn_rounds())
@quick
def test_assign_groups_shares_chosen_groups_evenly(rounds: tuple[int, int, list[list[list[bool]]]]) -> None:
    workers, share, signal = rounds
    with_signal, fillers = choose_groups(signal, workers * share)
    assigned = assign_groups(with_signal, fillers, [share] * workers)
    assert sorted(index for own in assigned for index in own) == sorted(with_signal + fillers)
    assert all(own == sorted(own) for own in assigned)
    assert [len(own) for own in assigned] == [share] * workers
    counts = [len(set(own) & set(with_signal)) for own in assigned]
    assert max(counts) - min(counts) <= 1
    assert not fillers or len(with_signal) == sum(has for each in signal for own in each for has in own)
    assert with_signal == sorted(with_signal) and fillers == sorted(fillers)
    # A group moves only from a worker that has its share of groups of that kind.
    for indices in (with_signal, fillers):
        kept = [sum(index in own and index[1] == rank for index in indices) for rank, own in enumerate(assigned)]
        capacity = [sum(index in own for index in indices) for own in assigned]
        drawn = [sum(index[1] == rank for index in indices) for rank in range(workers)]
        assert kept == [min(own, most) for own, most in zip(drawn, capacity, strict=True)]


# join_rows


def test_join_rows_pads_to_longest_row_left() -> None:
    first = rows([[5, 6, 7], [8]], [[1, 2], [3, 4]]).take([1])  # without the row of the longest prompt
    joined = join_rows([first, rows([[9, 9]], [[6, 7, 8]])], Padding(token=77, multiple=None, ratio=1.0))
    assert joined.batch["prompt_ids"].tolist() == [[0, 8], [9, 9]]
    assert joined.batch["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert joined.batch["completion_ids"].tolist() == [[3, 4, 77], [6, 7, 8]]
    assert joined.batch["completion_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    ratio = torch.tensor([[0.3, 0.4, 1.0], [0.6, 0.7, 0.8]])
    torch.testing.assert_close(joined.batch["importance_sampling_ratio"], ratio)
    assert joined.batch["advantages"].tolist() == [1, 1] and "num_items_in_batch" not in joined.batch
    assert joined.token_ids == [[3, 4], [6, 7, 8]]


def test_join_rows_pads_to_multiple() -> None:
    part = rows([[8]], [[3, 4]])
    wide = join_rows([part], Padding(token=77, multiple=4, ratio=1.0)).batch
    assert wide["prompt_ids"].tolist() == [[77, 77, 77, 8]] and wide["completion_ids"].tolist() == [[3, 4, 77, 77]]


TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=5)


@given(
    rounds=st.lists(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3), min_size=1, max_size=3),
    multiple=st.sampled_from([None, 1, 4]),
)
@quick
def test_join_rows_keeps_all_tokens(rounds: list[list[tuple[list[int], list[int]]]], multiple: int | None) -> None:
    parts = [rows([prompt for prompt, _ in each], [completion for _, completion in each]) for each in rounds]
    joined = join_rows(parts, Padding(token=77, multiple=multiple, ratio=1.0))
    every = [row for each in rounds for row in each]
    for side, at in (("prompt", 0), ("completion", 1)):
        ids, mask = joined.batch[f"{side}_ids"], joined.batch[f"{side}_mask"].bool()
        assert [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)] == [row[at] for row in every]
        longest = max(len(row[at]) for row in every)
        assert ids.shape[1] == longest if multiple is None else ids.shape[1] == -(-longest // multiple) * multiple
    assert joined.token_ids == [completion for _, completion in every] and len(joined.rows) == len(every)
    counted = joined.batch["completion_mask"].bool()
    expected = torch.where(counted, joined.batch["completion_ids"] / 10.0, torch.ones(()))
    torch.testing.assert_close(joined.batch["importance_sampling_ratio"], expected)


def test_join_rows_one_ratio_for_each_completion_keeps_width() -> None:
    parts = [rows([[8]], [[3, 4]]), rows([[9]], [[6, 7, 8]])]
    for part in parts:
        part.batch["importance_sampling_ratio"] = torch.full((1, 1), 0.5)
    joined = join_rows(parts, Padding(token=77, multiple=None, ratio=None)).batch
    assert joined["importance_sampling_ratio"].tolist() == [[0.5], [0.5]]


# fill_step


def sampler(rounds: int = 2, parts: int = 1) -> DynamicSampler:
    return DynamicSampler(rounds, 2, torch.ones(1), Padding(token=77, multiple=None, ratio=1.0), Workers(), parts)


def groups_of(*signal: bool) -> Rollout:
    """Make groups of two completions; those without signal have equal rewards."""
    made = rows([[5 + n] for n in range(len(signal)) for _ in range(2)], [[1, 2], [3]] * len(signal))
    for n, has in enumerate(signal):
        made.rewards[2 * n] = 0.0 if has else 1.0
    return made


def test_fill_step_all_groups_have_signal_keeps_first_round() -> None:
    first = groups_of(True, True)
    step = sampler().fill_step(first, lambda: pytest.fail("no further round is needed"))
    assert step.rollout is first and step.trained == [[True, True]]
    assert step.metrics == {"group/rounds": 1.0, "group/signal_share": 1.0}


def test_fill_step_takes_signal_of_later_rounds_then_fillers() -> None:
    later = iter([groups_of(False, False), groups_of(True, False)])
    step = sampler().fill_step(groups_of(False, False), lambda: next(later))
    assert step.trained == [[True, False], [False, False], [True, False]]
    assert step.metrics == {"group/rounds": 3.0, "group/signal_share": 0.5}
    # Tokens 5 of the first round and 5 of the third; each group has 3 tokens that count.
    assert step.rollout.batch["prompt_ids"].tolist() == [[5]] * 4
    assert step.rollout.batch["num_items_in_batch"].item() == 6


def test_fill_step_of_several_steps_divides_signal_evenly() -> None:
    first, later = groups_of(False, True, False, False), groups_of(False, True, False, False)
    step = sampler(rounds=1, parts=2).fill_step(first, lambda: later)
    assert step.trained == [[True, True, True, False], [False, True, False, False]]
    # The first step has the groups 6 and 5 of the first round, the second one 7 of it and 6 of the second round.
    assert step.rollout.batch["prompt_ids"].flatten().tolist() == [5, 5, 6, 6, 7, 7, 6, 6]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.scale_rewards=batch"], "grpo.scale_rewards=batch scales rewards by all groups"),
        (["grpo.multi_objective_aggregation=normalize_then_sum"], "normalize_then_sum scales rewards by all groups"),
    ],
)
def test_load_dynamic_sampling_with_other_option_raises(overrides: list[str], message: str) -> None:
    load_config(None, overrides)
    load_config(None, ["grpo.dynamic_sampling=2", "grpo.scale_rewards=none", "grpo.num_iterations=2"])
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["grpo.dynamic_sampling=2", *overrides])
