"""What the learner saves leaves the gradient as it is: every parameter's, against unmodified TRL, in float64."""

import itertools
import math
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from stock_trl import EQUAL, GROUP, PARTLY, REWARDS, SIGNAL, Diary, Ours, furthest, steps_of
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM
from trl import GRPOTrainer

from grpo_ray import batches, thrift
from grpo_ray.arguments import LOSS_TYPES
from grpo_ray.batches import (
    ENOUGH_TOKENS,
    Savings,
    Workers,
    arrange,
    by_length,
    choose_rows,
    deal,
    number_of_passes,
    packed,
    trimmed,
)
from grpo_ray.thrift import exact_savings, has_flash_attention, has_relative_positions, is_noisy

NEAR = 1e-12
"""Largest relative distance of a gradient; seen: 1e-14. A wrong denominator, or one row left out, is past 1e-2."""


@pytest.fixture(autouse=True)
def free_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few tokens go into as many passes as rows of hundreds do."""
    monkeypatch.setattr(batches, "PASS_COST", 0)


SAVED = ("completions_share", "positions_share", "tokens_saved")
"""Our metrics of what the learner read."""

ALONE = {
    "one pass": Savings(one_pass=True),
    "rows": Savings(rows=True),
    "shorter prompts": Savings(trim_prompts=True),
    "shorter completions": Savings(trim_completions=True),
    "rows regrouped": Savings(regroup=True),
    "fewer passes": Savings(rows=True, regroup=True, fewer_passes=True),
    "shifted": Savings(shift=True),
    "packed": Savings(pack=True),
    "labels only": Savings(head=True),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def accumulated(steps: int, per_generation: int | None = None) -> dict[str, int]:
    return {"gradient_accumulation_steps": steps, "steps_per_generation": per_generation or steps}


def compare(folder: Path, **settings: Any) -> tuple[Diary, Diary, Any]:
    """Train both; gives what was noted of ours and of stock TRL, and our trainer."""
    stock, _ = steps_of(GRPOTrainer, folder, **settings)
    ours, trainer = steps_of(Ours, folder, **settings)
    assert furthest(ours, stock) < NEAR
    return ours, stock, trainer


# Against stock TRL


def slow_case(*values: Any) -> Any:
    """A case that waits for the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


SCALES, LEVELS, ACCUMULATIONS = ("group", "batch", "none"), ("token", "sequence"), (1, 2, 4)


def every_combination() -> Iterator[Any]:
    """All of them; six of each loss type, among which each scale meets each level, are soon done."""
    for at, scale, level, accumulation in itertools.product(range(len(LOSS_TYPES)), SCALES, LEVELS, ACCUMULATIONS):
        turn = at + SCALES.index(scale) + LEVELS.index(level)
        case = (LOSS_TYPES[at], scale, level, accumulation)
        yield case if ACCUMULATIONS[turn % 3] == accumulation else slow_case(*case)


@pytest.mark.parametrize(("loss_type", "scale", "level", "accumulation"), every_combination())
def test_all_savings_together_leave_the_gradient_as_it_is(
    tmp_path: Path, loss_type: str, scale: str, level: str, accumulation: int
) -> None:
    ours, _, trainer = compare(
        tmp_path,
        loss_type=loss_type,
        scale_rewards=scale,
        importance_sampling_level=level,
        **accumulated(accumulation),
    )
    regroups = loss_type != "bnpo"
    assert trainer.savings == Savings(
        one_pass=True,
        rows=True,
        regroup=regroups,
        share=regroups,
        trim_prompts=True,
        trim_completions=True,
        shift=True,
        head=True,
    )
    assert all(log["learner/completions_share"] < 0.8 for log in ours.logs)
    assert all(log["learner/positions_share"] < log["learner/completions_share"] for log in ours.logs)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_savings_of_a_gpu_leave_the_gradient_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    monkeypatch.setattr(thrift, "exact_savings", of_a_gpu)
    passes = []
    monkeypatch.setattr(thrift, "packed", lambda *args: passes.append(args) or packed(*args))
    compare(tmp_path, loss_type=loss_type, **accumulated(4))
    # A third of the rows has a gradient, so of four micro-batches two are left.
    assert len(passes) == 2 * (4 if loss_type == "bnpo" else 2)


def of_a_gpu(trainer: Any) -> Savings:
    """What is saved on a GPU with flash attention; here with another attention, which is slower and as exact."""
    savings = exact_savings(trainer)
    return replace(savings, fewer_passes=savings.regroup, pack=True)


@pytest.mark.parametrize("saving", ALONE)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_saving_alone_leaves_the_gradient_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, saving: str
) -> None:
    if ALONE[saving].regroup and loss_type == "bnpo":
        pytest.skip("bnpo divides by the tokens of each micro-batch")
    monkeypatch.setattr(thrift, "exact_savings", lambda trainer: ALONE[saving])
    compare(tmp_path, loss_type=loss_type, **accumulated(2))


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_importance_sampling_mode": "token_truncate"},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
        {"vllm_importance_sampling_mode": "sequence_truncate"},
        {"vllm_importance_sampling_correction": False},
        {"mask_truncated_completions": True},
        {"delta": 1.5, "num_iterations": 2},
        {"off_policy_mask_threshold": 0.1},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_target": 5.0},
        {"top_entropy_quantile": 0.3},
        accumulated(4, 2),
        accumulated(4, 1),
        accumulated(2, 4),
        accumulated(1, 4) | {"num_iterations": 2},
        {"per_device_train_batch_size": 4},
        {"rewards": [EQUAL]},
        {"rewards": [SIGNAL]},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_type", ["dapo", slow_case("bnpo"), slow_case("vespo")])
def test_other_settings_leave_the_gradient_as_it_is(tmp_path: Path, loss_type: str, settings: dict[str, Any]) -> None:
    if "delta" in settings and loss_type == "vespo":
        pytest.skip("TRL has no two-sided clipping for vespo")
    compare(tmp_path, loss_type=loss_type, **(accumulated(2) | settings))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_metrics_stay_but_for_those_that_need_a_forward_pass_of_every_row(
    tmp_path: Path, loss_type: str, level: str
) -> None:
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon": 0.01, "num_iterations": 2}
    ours, stock, _ = compare(tmp_path, **settings, max_steps=4)
    needs_all = {"entropy", "vespo/phi_seq_mean", "step_time"}
    clipped = [name for name in stock.logs[1] if "clip" in name and "clipped_ratio" not in name]
    assert bool(clipped) == (loss_type not in ("sapo", "vespo"))
    for mine, theirs in zip(ours.logs, stock.logs, strict=True):
        assert mine.keys() - theirs.keys() in (set(), {f"learner/{name}" for name in SAVED})
        for name in theirs.keys() - needs_all:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name
    if clipped:  # in the second iteration the policy has moved
        assert any(stock.logs[1][name] for name in clipped)


def test_metrics_of_learner_against_engine_stay_where_every_row_has_a_gradient(tmp_path: Path) -> None:
    for mode in ("sequence_mask", "token_truncate"):
        ours, stock, _ = compare(
            tmp_path, rewards=[(1.0, 0.0, 0.2, 0.5)], vllm_importance_sampling_mode=mode, **accumulated(4)
        )
        for mine, theirs in zip(ours.logs, stock.logs, strict=True):
            names = [name for name in theirs if name.startswith("sampling/")]
            assert len(names) == 5
            for name in [*names, "loss", "grad_norm"]:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


def test_the_same_run_twice_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    first, second = (steps_of(Ours, tmp_path, **accumulated(4))[0].gradients for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# Law 4


def test_the_sync_is_proven_once_a_batch_before_its_step_on_what_trl_would_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thrift, "exact_savings", lambda trainer: Savings(one_pass=True))
    said: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Listening(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            mask = output["completion_mask"].bool()
            said.append((output["old_per_token_logps"][mask], output["sampling_per_token_logps"][mask]))
            return output

    steps_of(Listening, tmp_path, **accumulated(2))
    _, trainer = steps_of(Ours, tmp_path, **accumulated(2))
    assert [step for step, _, _ in trainer.proven] == [0, 1]
    for (learner, engine), (_, own_learner, own_engine) in zip(said, trainer.proven, strict=True):
        # TRL shuffles the rows in between.
        for theirs, mine in ((learner, own_learner), (engine, own_engine)):
            torch.testing.assert_close(mine.nan_to_num().sort()[0], theirs.nan_to_num().sort()[0], rtol=1e-10, atol=0)


def test_a_sync_that_is_not_proven_stops_the_run_before_the_weights_move(tmp_path: Path) -> None:
    class Unproven(Ours):
        def prove(self, *args: Any) -> None:
            self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            raise RuntimeError("not in sync")

        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            first = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            with pytest.raises(RuntimeError, match="not in sync"):
                super()._inner_training_loop(*args, **kwargs)
            assert all(torch.equal(first[name], p) for name, p in self.model.named_parameters())
            self.stopped = True

    assert steps_of(Unproven, tmp_path, **accumulated(2))[1].stopped


def test_a_batch_without_any_gradient_still_proves_the_sync(tmp_path: Path) -> None:
    _, trainer = steps_of(Ours, tmp_path, rewards=[EQUAL], **accumulated(2))
    assert [step for step, _, _ in trainer.proven] == [0, 1]
    assert all(len(learner) >= 12 for _, learner, _ in trainer.proven)


# Several workers


def take_steps(rank: int, folder: str, port: int, loss_type: str, rewards: Any, accumulation: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",  # or accelerate takes more, which wait for each other
    }  # fmt: skip
    torch.set_num_threads(1)

    class AsOnAGpu(Ours):
        savings = cached_property(of_a_gpu)

    ours, stock = (
        steps_of(
            kind, Path(folder), rewards=rewards, rank=rank, loss_type=loss_type, ddp_backend="gloo",
            **accumulated(accumulation),
        )[0]
        for kind in (AsOnAGpu if accumulation > 1 else Ours, GRPOTrainer)
    )  # fmt: skip
    assert furthest(ours, stock) < NEAR
    # Only the first worker's rows have a gradient; the second has one to prove its engine.
    assert all(log["learner/completions_share"] <= 0.5 for log in ours.logs)
    clipped = "clip_ratio/region_mean"
    assert all(a.get(clipped) == b.get(clipped) for a, b in zip(ours.logs, stock.logs, strict=True))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("loss_type", "accumulation"),
    [("grpo", 2), ("bnpo", 1), *itertools.starmap(slow_case, [("dapo", 1), ("dapo", 2), ("bnpo", 2), ("grpo", 1)])],
)
def test_two_workers_agree_with_trl_when_one_has_nothing_left(
    tmp_path: Path, loss_type: str, accumulation: int
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Of a step's groups the first worker gets the first half.
    rewards = [SIGNAL, EQUAL, *[PARTLY, EQUAL] * (accumulation - 1), *[EQUAL] * 2 * accumulation]
    arguments = (str(tmp_path), port, loss_type, rewards, accumulation)
    mp.start_processes(take_steps, args=arguments, nprocs=2, start_method="spawn")


# What is exact where

PADDING = {"trim_prompts", "trim_completions", "shift"}


@pytest.mark.parametrize(
    ("changed", "off"),
    [
        ({}, set()),
        ({"device": "cpu"}, {"fewer_passes"}),
        ({"num_iterations": 2}, {"one_pass"}),
        ({"accumulation": 1}, {"one_pass", "regroup", "share", "fewer_passes"}),
        ({"beta": 0.01}, {"rows"}),
        ({"_entropy_bonus_enabled": True}, {"rows", "regroup", "share", "fewer_passes"}),
        ({"top_entropy_quantile": 0.8}, {"rows", "regroup", "share", "fewer_passes"}),
        ({"aux_loss_enabled": True}, {"rows", "regroup", "share", "fewer_passes", "pack", "shift"}),
        ({"loss_type": "bnpo"}, {"regroup", "share", "fewer_passes"}),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_clip_max": 0.9},
            {"trim_prompts", "trim_completions", "shift"},
        ),
        ({"pad_to_multiple_of": 64}, {"trim_prompts", "trim_completions", "shift"}),
    ],
)
def test_a_saving_that_would_change_the_gradient_is_off(changed: dict[str, Any], off: set[str]) -> None:
    model = llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    device = torch.device(changed.get("device", "cuda"))
    settings = {
        "model": model, "accelerator": SimpleNamespace(device=device),
        "num_iterations": 1, "beta": 0.0, "_entropy_bonus_enabled": False,
        "top_entropy_quantile": 1.0, "aux_loss_enabled": False, "loss_type": "dapo",
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 3.0,
    } | changed  # fmt: skip
    args = SimpleNamespace(
        gradient_accumulation_steps=changed.get("accumulation", 4),
        steps_per_generation=4,
        pad_to_multiple_of=changed.get("pad_to_multiple_of"),
    )
    made = vars(thrift.exact_savings(SimpleNamespace(args=args, **settings)))
    assert {name for name, on in made.items() if not on} == off


def test_rows_are_packed_where_attention_keeps_them_apart_at_no_cost() -> None:
    model = llama()
    assert not has_flash_attention(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert has_flash_attention(model)


def llama(**changed: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changed))


def test_a_model_with_dropout_is_noisy_wherever_it_is_said() -> None:
    from peft import LoraConfig, get_peft_model

    assert not is_noisy(llama()) and is_noisy(llama(attention_dropout=0.1))
    for rate in (0.0, 0.1):
        adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=rate)
        assert is_noisy(get_peft_model(llama(), adapter)) == bool(rate)
    assert thrift.exact_savings(SimpleNamespace(model=llama(attention_dropout=0.1))) == Savings()


def test_prompts_are_cut_only_where_positions_are_relative() -> None:
    def rope(**parameters: Any) -> LlamaForCausalLM:
        return llama(rope_parameters={"rope_theta": 1e4, **parameters})

    assert has_relative_positions(llama()) and has_relative_positions(rope(rope_type="linear", factor=2.0))
    assert not has_relative_positions(rope(rope_type="dynamic", factor=2.0))  # another base for each length
    assert not has_relative_positions(SimpleNamespace(config=GPT2Config()))
    stateful = llama()
    stateful._is_stateful = True
    assert not has_relative_positions(stateful)


# The parts


def test_rows_are_filled_up_with_the_cheapest_that_can_prove_the_sync() -> None:
    lengths = [5, 40, 3, 90, 33, 12]
    needed = [True, False, False, False, False, False]
    assert ENOUGH_TOKENS == 32
    assert choose_rows(needed, lengths, 2) == [0, 4]  # 33 tokens are enough, and 40 more than that
    assert choose_rows(needed, lengths, 5) == [0, 1, 3, 4, 5]  # then the longest of those that are too short
    assert choose_rows([True] * 6, lengths, 6) == list(range(6))


def test_a_mean_over_the_passes_that_are_left_is_the_mean_over_all_rows() -> None:
    batches = [
        {
            "prompt_ids": torch.ones(4, 2), "prompt_mask": torch.ones(4, 2), "completion_ids": torch.ones(4, 3),
            "completion_mask": torch.ones(4, 3), "advantages": torch.tensor([1.0, 0.0, 0.0, signal]),
        }
        for signal in (0.0, 0.0, 1.0, 1.0)
    ]  # fmt: skip
    savings = Savings(rows=True, regroup=True, fewer_passes=True)
    made, metrics = arrange(batches, savings, "grpo", Workers())
    assert [len(batch["advantages"]) for batch, _ in made] == [0, 0, 3, 3]
    assert metrics["learner/completions_share"] == metrics["learner/positions_share"] == 6 / 16
    for weight in ("row_weight", "token_weight"):  # TRL takes a mean over the two passes
        assert sum(getattr(part, weight) for _, part in made[2:]) / 2 == 6 / 16
    assert [part.loss_factor for _, part in made] == [0, 0, 3 / 4, 3 / 4]


def test_workers_get_as_many_rows_and_as_much_to_read() -> None:
    length = {(0, 0): 9, (0, 1): 8, (0, 2): 7, (0, 3): 2, (0, 4): 2, (1, 3): 1}
    assert deal(list(length), length.__getitem__, 2) == [[(0, 0), (0, 3), (0, 4)], [(0, 1), (0, 2), (1, 3)]]


def test_rows_that_move_keep_all_that_they_have() -> None:
    """Two workers, in two threads of this process."""
    pots = [
        {
            "prompt_ids": torch.tensor([[0, 5 + rank], [3, 4]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
            "completion_ids": torch.tensor([[7, 7, 7], [8, 0, 0]]) + rank,
            "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
            "advantages": torch.tensor([1.0, 2.0]) * (1 - rank), "num_items_in_batch": torch.tensor(4),
        }
        for rank in (0, 1)
    ]  # fmt: skip
    given: dict[Any, Any] = {}
    both_gave = threading.Barrier(2)

    def of(rank: int) -> Workers:
        # The first worker has 6 positions to read and the second, for the proof of its engine, 4.
        def table(own: torch.Tensor) -> torch.Tensor:
            if len(own) != 6:
                return own[None]  # sums of what was kept
            both = [[1, 1, 4, 3, 3, 1], [0, 0, 4, 3, 3, 1]]
            assert own.tolist() == both[rank]
            return torch.tensor(both, dtype=torch.float)

        def exchange(away: Any) -> Any:
            given.update(away)
            both_gave.wait(60)
            return given

        return Workers(rank, table, exchange)

    savings = Savings(rows=True, regroup=True, share=True)
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda rank: arrange([pots[rank]], savings, "grpo", of(rank))[0][0], (0, 1))
    (first, _), (second, part) = made
    # Three rows are needed, and a fourth makes them as many on both: the longest and the shortest, and the two between.
    assert first["advantages"].tolist() == [1.0, 0.0] and first["completion_ids"].tolist() == [[7, 7, 7], [9, 0, 0]]
    assert second["advantages"].tolist() == [0.0, 2.0] and part.loss_factor == 1.0
    assert second["completion_ids"].tolist() == [[8, 8, 8], [8, 0, 0]]
    assert second["prompt_ids"].tolist() == [[0, 6], [3, 4]] and second["num_items_in_batch"].item() == 4


def test_rows_are_dealt_out_with_others_of_their_length() -> None:
    assert by_length([3, 9, 4, 9, 1], [0, 1, 2, 3, 4], 2) == [[1, 3, 2], [0, 4]]
    assert by_length([3, 9, 4, 9, 1], [4, 0], 2) == [[0], [4]]


def test_rows_are_read_in_as_many_passes_as_take_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PASS_COST", 100)
    assert number_of_passes([[200, 190, 180, 170]], 1, 4) == 1  # padding is less than a pass
    assert number_of_passes([[400, 390, 20, 10]], 1, 4) == 2  # short rows beside long ones are not
    assert number_of_passes([[400, 390, 20, 10]], 3, 4) == 3
    assert number_of_passes([[300, 300], [300, 100]], 1, 2) == 1  # the worker that reads most decides


def test_only_columns_that_no_row_needs_are_cut() -> None:
    batch = {
        "prompt_ids": torch.tensor([[0, 0, 5], [0, 6, 7]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[8, 0, 0, 0], [9, 9, 0, 0]]),
        "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]),
        "importance_sampling_ratio": torch.ones(2, 1),
        "num_items_in_batch": torch.tensor(3),
    }
    cut = trimmed(batch)
    assert cut["prompt_ids"].tolist() == [[0, 5], [6, 7]]
    assert cut["completion_ids"].tolist() == [[8, 0], [9, 9]]
    assert cut["importance_sampling_ratio"].shape == (2, 1) and cut["num_items_in_batch"] is batch["num_items_in_batch"]
    nothing = batch | {"completion_mask": torch.zeros(2, 4)}
    assert trimmed(nothing)["completion_ids"].shape == (2, 1)


def test_the_rewards_of_these_tests_leave_some_rows_and_not_others() -> None:
    has_signal = [not all(r == pay[0] for r in pay) for pay in REWARDS]
    assert 0 < sum(has_signal) < len(REWARDS) and len(SIGNAL) == GROUP and math.isclose(sum(PARTLY) / 4, 0.5)
