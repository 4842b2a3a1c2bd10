"""Tests of supervised fine-tuning without a policy: tokens of demonstrations, and the record of a step."""

import json
from types import SimpleNamespace
from typing import Any

import torch

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.hooks import LearnerHooks
from grpo_ray.learner.sft import SftLearner, encode_demonstrations
from grpo_ray.models.warm_up import build_tokenizer
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.telemetry.profiler import PhaseProfiler

TOKENIZER = build_tokenizer()


def demonstration(completion: str) -> Problem:
    prompt = [{"role": "user", "content": "7 + 5"}]
    return Problem(id="00000000000000aa", prompt=prompt, solution="", columns={"completion": completion})


def test_completion_with_an_end_token_gets_no_second_one() -> None:
    plain, ended = demonstration("12"), demonstration(f"12{TOKENIZER.eos_token}")
    for problem in (plain, ended):
        [encoded] = encode_demonstrations(TOKENIZER, [problem], 3, {})
        assert list(encoded.completion_ids) == [*TOKENIZER("12")["input_ids"], TOKENIZER.eos_token_id]
        assert not encoded.truncated


def test_demonstrations_of_the_step_drawn_last_can_be_studied() -> None:
    learner: Any = SftLearner.__new__(SftLearner)  # without a policy
    recorded: list[GroupRecord] = []
    learner.config = load_config(None, ["run.kind=sft", "data.train=a.jsonl", "grpo.max_completion_length=3"])
    learner.hooks = LearnerHooks(record_groups=recorded.extend)
    learner.workers, learner.profiler = Workers(), PhaseProfiler()
    learner.processing_class = TOKENIZER
    learner.accelerator = SimpleNamespace(device=torch.device("cpu"))
    learner.state = SimpleNamespace(global_step=4)
    learner._metrics = {"train": {"completions/mean_length": [], "completions/clipped_ratio": []}}
    learner._begin_step([(demonstration("12"), 0)])
    learner._begin_step([(demonstration("12"), 1), (demonstration("1 + 2"), 1)])
    expected = {"step": 5, "epoch": 1, "problem": "00000000000000aa", "source": "", "lengths": [3]}
    assert json.loads(json.dumps(learner.groups_for_study(), allow_nan=False)) == [
        {**expected, "truncated": [False]},
        {**expected, "truncated": [True]},
    ]
    assert len(recorded) == 3
