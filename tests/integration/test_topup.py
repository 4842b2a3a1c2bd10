"""A topped-up step is the step that stock TRL takes on the same groups, whatever the number of workers; in float64."""

import math
import operator
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from faulty_runs import outcome_of, same
from small_runs import events_of, used
from stock_trl import EQUAL, GROUP, LONGEST, PARTLY, SIGNAL, UNSCORABLE, Diary, HandMade, furthest, steps_of
from trl import GRPOTrainer

from grpo_ray.chaos import Fault
from grpo_ray.course import GroupBatches
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.problem import Problem
from grpo_ray.settings import load
from grpo_ray.thrift import Thrift
from grpo_ray.topup import Padding, Rows, choose, deal, differ, join, signals, top_up

NEAR = 1e-12
"""Largest relative distance of a gradient; one group instead of another is past 1e-2."""

STREAM = (
    SIGNAL, EQUAL, EQUAL, UNSCORABLE,  # one has signal
    PARTLY, EQUAL, SIGNAL, SIGNAL,  # three more: enough
    EQUAL, (0.0,) * 4, EQUAL, UNSCORABLE,
    EQUAL, SIGNAL, EQUAL, EQUAL,
    PARTLY, EQUAL, EQUAL, EQUAL,  # two in three rounds
    SIGNAL, PARTLY, (0.0, 1.0, None, 0.0), SIGNAL,
)  # fmt: skip
"""Rewards of the problems of a stream, in steps of four: with two rounds more, these are three steps."""
CHOSEN = ((0, 4, 6, 7), (8, 9, 13, 16), (20, 21, 22, 23))
"""The problems that these steps are taken on, by hand: the second is filled up with the first two that it drew."""


pytestmark = pytest.mark.usefixtures("one_thread")


class ByProblem(HandMade):
    """Completions that depend on their problem and their index alone, as the engine's do."""

    rows: Sequence[dict[str, Any]] = ()

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        completions, logprobs = [], []
        for prompt, row in zip(prompts, self.rows, strict=True):
            self.rng = random.Random(f"{row['id']}/{row['index']}")
            _, made, said, _ = super().generate([prompt])
            completions += made
            logprobs += said
        return prompts, completions, logprobs, None


class OnStream(GRPOTrainer):
    """Stock TRL on problems of ours."""

    problems: Sequence[int] = ()
    """Numbers of the problems of all steps, over all workers."""
    pays: Sequence[Any] = STREAM

    def get_train_dataloader(self) -> Any:
        workers, rank = self.accelerator.num_processes, self.accelerator.process_index
        step = self.args.per_device_train_batch_size * self.args.steps_per_generation * workers // GROUP
        share = step // workers
        mine = [n for at, n in enumerate(self.problems) if at // share % workers == rank]
        stream = [
            Problem(
                id=f"{n:016x}",
                prompt=[{"role": "user", "content": "7 + 5 " * (1 + n % 5)}],
                solution="12",
                columns={"pays": self.pays[n]},
            )
            for n in mine
        ]
        repeats = self.args.steps_per_generation * self.num_iterations
        self.batches = GroupBatches([(each, 0) for each in stream], share, GROUP, repeats)
        return self.batches

    def train(self) -> Any:
        self.vllm_generation = ByProblem(0, LONGEST)
        return super().train()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self.vllm_generation.rows = inputs
        return super()._generate_and_score_completions(inputs)


class ToppedUp(Thrift, OnStream):
    """Ours: the savings, and steps topped up with two more rounds."""

    rounds = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trained_on: list[list[int]] = []
        self.drawn: list[list[list[int]]] = []
        self.kept: list[list[list[bool]]] = []
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        own = rewards.chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        self.part = {"rewards": own, "token_ids": completion_ids_list}
        return rewards

    def a_round(self, inputs: list[dict[str, Any]]) -> Rows:
        output = super()._generate_and_score_completions(inputs)
        self.drawn[-1].append([int(row["id"], 16) for row in inputs[::GROUP]])
        return Rows(inputs=inputs, output=output, **self.part)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self.drawn.append([])
        self.first = self.a_round(inputs)
        step = top_up(self, self.first, lambda: self.a_round(self.batches.draw()), self.rounds)
        self.step = step.rows
        self.kept.append(step.kept)
        self.trained_on.append([int(row["id"], 16) for row in step.rows.inputs[::GROUP]])
        return step.rows.output


def on(kind: type[OnStream], folder: Path, problems: Sequence[int], **settings: Any) -> tuple[Diary, Any]:
    """Train on a stream of problems in steps of four; `pays` and `rounds` are those of the trainer."""
    own = {name: settings.pop(name) for name in ("pays", "rounds") if name in settings}
    sizes = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 3}
    made = type(kind.__name__, (kind,), {"problems": problems, **own})
    return steps_of(made, folder, **(sizes | settings))


def everything() -> range:
    return range(len(STREAM))


def flat(chosen: Sequence[Sequence[int]]) -> list[int]:
    return [number for step in chosen for number in step]


# Against stock TRL


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 1, "steps_per_generation": 1,
         "per_device_train_batch_size": 16},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"vllm_importance_sampling_mode": "sequence_truncate", "num_iterations": 2, "max_steps": 6},
        {"vllm_importance_sampling_mode": "token_mask", "num_iterations": 2, "max_steps": 6},
        {"vllm_importance_sampling_correction": False},
        {"pad_to_multiple_of": 8},
        {"mask_truncated_completions": True},
        {"beta": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_a_topped_up_step_has_the_gradient_of_stock_trl_on_the_chosen_groups(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    ours, trainer = on(ToppedUp, tmp_path, everything(), **settings)
    stock, _ = on(OnStream, tmp_path, flat(CHOSEN), **settings)
    assert trainer.trained_on == [list(step) for step in CHOSEN]
    assert furthest(ours, stock) < NEAR
    # As many tokens count as in the groups that were chosen, and not in those that were drawn.
    wrong, _ = on(OnStream, tmp_path, everything(), **settings)
    assert furthest(ours, wrong) > 1e-2


# How far it goes


def test_a_step_draws_no_more_rounds_than_it_needs_and_may(tmp_path: Path) -> None:
    diary, trainer = on(ToppedUp, tmp_path, everything())
    assert [len(rounds) for rounds in trainer.drawn] == [2, 3, 1]
    assert [log["group/rounds"] for log in diary.logs] == [2, 3, 1]
    assert [log["group/signal_share"] for log in diary.logs] == [1.0, 0.5, 1.0]
    assert flat(flat(trainer.drawn)) == list(everything())  # each was drawn once
    assert [[sum(each) for each in rounds] for rounds in trainer.kept] == [[1, 3], [2, 1, 1], [4]]


def test_a_step_whose_groups_all_have_signal_is_left_as_it_was_drawn(tmp_path: Path) -> None:
    _, trainer = on(ToppedUp, tmp_path, range(20, 24), max_steps=1)
    assert trainer.step is trainer.first


def test_where_no_group_has_signal_the_step_ends_with_its_rounds_and_has_no_gradient(tmp_path: Path) -> None:
    pays = (EQUAL, UNSCORABLE, (0.0,) * 4, (0.7,) * 4) * 3
    diary, trainer = on(ToppedUp, tmp_path, range(12), pays=pays, max_steps=1)
    assert trainer.drawn == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
    assert trainer.trained_on == [[0, 1, 2, 3]]
    assert all(not gradient.any() for gradient in diary.gradients[0].values())
    assert diary.logs[0]["group/signal_share"] == 0.0 and math.isfinite(diary.logs[0]["loss"])


def test_a_stream_that_ends_inside_a_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 of a step's 4 problems"):
        on(ToppedUp, tmp_path, range(4), max_steps=1)


# Several workers


def train_alone(rank: int, folder: str, port: int, workers: int, accumulation: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    sizes = {"gradient_accumulation_steps": accumulation, "steps_per_generation": accumulation}
    sizes["per_device_train_batch_size"] = 4 * GROUP // workers // accumulation
    diary, trainer = on(ToppedUp, Path(folder), everything(), ddp_backend="gloo", **sizes)
    noted = (diary.gradients, diary.logs, trainer.trained_on, trainer.drawn, trainer.kept)
    torch.save(noted, Path(folder, f"worker-{rank}"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("workers", "accumulation"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_the_step_is_the_same_whatever_the_number_of_workers(tmp_path: Path, workers: int, accumulation: int) -> None:
    alone, trainer = on(ToppedUp, tmp_path, everything())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (str(tmp_path), port, workers, accumulation)
    mp.start_processes(train_alone, args=arguments, nprocs=workers, start_method="spawn")
    noted = [torch.load(tmp_path / f"worker-{rank}", weights_only=False) for rank in range(workers)]
    gradients, logs, trained_on, drawn, kept = zip(*noted, strict=True)
    for rank in range(workers):
        assert furthest(Diary(gradients[rank]), alone) < NEAR
        for mine, theirs in zip(logs[rank], alone.logs, strict=True):
            for name in ("group/rounds", "group/signal_share", "frac_reward_zero_std", "reward"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6), name
    for step, chosen in enumerate(CHOSEN):
        assert sorted(flat([each[step] for each in trained_on])) == sorted(chosen)
        assert all(len(each[step]) == 4 // workers for each in trained_on)
        # What each worker drew and what became of it are in the order of the stream.
        for number in range(len(trainer.drawn[step])):
            assert flat([each[step][number] for each in drawn]) == trainer.drawn[step][number]
            assert flat([each[step][number] for each in kept]) == trainer.kept[step][number]


# The parts


@pytest.mark.parametrize(
    ("rewards", "has"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((0.7, 0.1 + 0.2 + 0.4), False),  # 0.7000000000000001
        ((math.nan, 1.0), False),  # one alone has nothing to be compared with
        ((math.nan, 1.0, 0.0), True),
        ((math.nan, math.nan), False),
        ((1000.0, 1000.0001), False),
        ((0.0, 1e-3), True),
    ],
)
def test_a_group_has_signal_if_its_rewards_differ(rewards: tuple[float, ...], has: bool) -> None:
    assert differ(rewards) == has


def test_a_group_has_no_signal_where_nothing_of_it_counts() -> None:
    group = rows([[5], [5]], [[1, 2], [3, 4]])
    group.rewards[0], group.output["advantages"] = 0.0, torch.tensor([-1.0, 1.0])
    assert signals(group, torch.ones(1), 2) == [True]
    group.output["completion_mask"][:] = 0  # both were cut off, and TRL masks them
    assert signals(group, torch.ones(1), 2) == [False]


def test_groups_with_signal_come_first_in_the_order_drawn_and_others_fill_up() -> None:
    signal = [[[False, True], [False, False]], [[True, False], [True, True]]]  # two rounds of two workers
    assert choose(signal, 4) == ([(0, 0, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)], [])
    assert choose(signal, 3) == ([(0, 0, 1), (1, 0, 0), (1, 1, 0)], [])
    assert choose([signal[0]], 4) == ([(0, 0, 1)], [(0, 0, 0), (0, 1, 0), (0, 1, 1)])


def test_groups_stay_with_their_worker_while_it_has_room_and_signal_is_shared_out_evenly() -> None:
    chosen = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 1)]
    assert deal(chosen, [], [2, 2]) == [[(0, 0, 0), (0, 0, 1)], [(1, 0, 0), (1, 1, 1)]]
    # Two of the first worker's: each has one, and a filler.
    assert deal(chosen[:2], [(0, 1, 0), (0, 1, 1)], [2, 2]) == [[(0, 0, 0), (0, 1, 1)], [(0, 0, 1), (0, 1, 0)]]
    draw = random.Random(0)
    for _ in range(200):
        workers, share = draw.choice([(1, 4), (2, 3), (3, 2), (4, 1)])
        signal = [
            [[draw.random() < 0.4 for _ in range(share)] for _ in range(workers)] for _ in range(draw.randint(1, 4))
        ]
        with_signal, fillers = choose(signal, workers * share)
        hands = deal(with_signal, fillers, [share] * workers)
        assert sorted(flat(hands)) == sorted(with_signal + fillers)
        assert [len(hand) for hand in hands] == [share] * workers
        taught = [len(set(hand) & set(with_signal)) for hand in hands]
        assert max(taught) - min(taught) <= 1
        assert not fillers or len(with_signal) == sum(map(sum, flat(signal)))


def rows(prompts: list[list[int]], completions: list[list[int]]) -> Rows:
    def padded(lists: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, lists))
        filled = [[0] * (width - len(each)) + each if left else each + [0] * (width - len(each)) for each in lists]
        return torch.tensor(filled), (torch.tensor(filled) != 0).long()

    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(completions, left=False)
    output = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask, "importance_sampling_ratio": completion_ids / 10.0,
        "advantages": torch.ones(len(prompts)), "num_items_in_batch": torch.tensor(99),
    }  # fmt: skip
    return Rows([{}] * len(prompts), completions, torch.ones(len(prompts), 1), output)


def test_rows_of_several_rounds_are_as_wide_as_the_longest_of_them() -> None:
    first = rows([[5, 6, 7], [8]], [[1, 2], [3, 4]]).take([1])  # the long prompt is left behind
    joined = join([first, rows([[9, 9]], [[6, 7, 8]])], Padding(token=77, multiple=None, ratio=1.0))
    assert joined.output["prompt_ids"].tolist() == [[0, 8], [9, 9]]
    assert joined.output["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert joined.output["completion_ids"].tolist() == [[3, 4, 77], [6, 7, 8]]
    assert joined.output["completion_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    ratio = torch.tensor([[0.3, 0.4, 1.0], [0.6, 0.7, 0.8]])
    torch.testing.assert_close(joined.output["importance_sampling_ratio"], ratio)
    assert joined.output["advantages"].tolist() == [1, 1] and "num_items_in_batch" not in joined.output
    assert joined.token_ids == [[3, 4], [6, 7, 8]]
    wide = join([first], Padding(token=77, multiple=4, ratio=1.0)).output
    assert wide["prompt_ids"].tolist() == [[77, 0, 0, 8]] and wide["completion_ids"].tolist() == [[3, 4, 77, 77]]


def test_completions_with_images_are_refused() -> None:
    group = rows([[5]], [[1, 2]])
    group.output["pixel_values"] = torch.zeros(1)
    with pytest.raises(ConfigError, match="knows only text"):
        top_up(None, group, lambda: group, 2)


# The config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo.scale_rewards=batch"], "grpo.scale_rewards=batch scales rewards by all groups"),
        (["grpo.multi_objective_aggregation=normalize_then_sum"], "normalize_then_sum scales rewards by all groups"),
        (["run.hang_factor=3"], "may take 3 times its usual time"),
    ],
)
def test_what_cannot_be_topped_up_is_refused(overrides: list[str], said: str) -> None:
    load(None, overrides)
    load(None, ["grpo.dynamic_sampling=2", "grpo.scale_rewards=none", "grpo.num_iterations=2"])
    with pytest.raises(ConfigError, match=said):
        load(None, ["grpo.dynamic_sampling=2", *overrides])


# The whole


@pytest.mark.slow
def test_a_topped_up_run_uses_each_problem_once_whatever_is_killed_and_however_many_workers_it_has(
    small_run: Callable[..., Any],
) -> None:
    settings = [
        "grpo.dynamic_sampling=2", "grpo.max_steps=6", "grpo.save_steps=2", "data.limit=18", "data.heldout_limit=4",
        "rewards.functions=['reward_spies:half_signal']", "run.max_failures=9",
    ]  # fmt: skip
    _, folder = small_run("whole", *settings)
    whole = outcome_of(folder)
    rounds = [row["group/rounds"] for row in whole["rows"]]
    assert set(rounds) == {2.0, 3.0}, rounds  # as the ids of the problems have it
    drawn, trained = Counter(), Counter()
    for group in whole["groups"]:
        drawn[group["step"]] += 1
        trained[group["step"]] += group["trained"]
        if len(set(group["rewards"])) > 1:  # where a step is filled up, all that have signal are in it
            assert group["trained"] or whole["rows"][group["step"] - 1]["group/signal_share"] == 1.0
    assert [drawn[step] for step in range(1, 7)] == [4 * count for count in rounds]
    assert trained == dict.fromkeys(range(1, 7), 4)
    epochs = used(whole["groups"])
    assert len(epochs) >= 3  # they end inside of steps
    assert all(set(epoch.values()) == {1} for epoch in epochs.values())
    assert all(len(epochs[epoch]) == 18 for epoch in sorted(epochs)[:-1])

    faults = [Fault("kill-backward", 3, 0), Fault("kill-generation", 5, 1)]
    _, folder = small_run("killed", *settings, faults=faults)
    assert len(events_of(folder, "failed")) == 2
    same(outcome_of(folder), whole)

    _, folder = small_run("alone", *settings, "cluster.num_workers=1")
    facts = operator.itemgetter("step", "epoch", "problem", "trained")
    assert list(map(facts, outcome_of(folder)["groups"])) == list(map(facts, whole["groups"]))
