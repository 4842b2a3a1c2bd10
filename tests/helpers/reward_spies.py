"""Reward functions that record a run or make it fail on purpose; used in `rewards.functions` as `reward_spies:name`."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def record(
    completions: list[Any],
    id: list[str],
    index: list[int],
    completion_ids: list[list[int]],
    trainer_state: Any,
    *,
    folder: str,
    **kwargs: Any,
) -> list[float]:
    """Record the sampled tokens; return rewards that differ within a group, so that no group has zero variance."""
    with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
        for problem, number, tokens in zip(id, index, completion_ids, strict=True):
            row = {"step": trainer_state.global_step, "id": problem, "index": number, "tokens": list(tokens)}
            file.write(json.dumps(row) + "\n")
    return [(len(tokens) + sum(tokens)) % 7 / 7 for tokens in completion_ids]


def half_signal(id: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return rewards that differ for about half of the problems, and zeros for the others: zero-variance groups."""
    rewards = [(len(tokens) + sum(tokens)) % 7 / 7 for tokens in completion_ids]
    return [0.0 if int(problem, 16) % 2 else reward for problem, reward in zip(id, rewards, strict=True)]


def reads_rare(rare: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 where the column `rare` has a value; fails without the column."""
    return [float(value is not None) for value in rare]


def fail_once(completions: list[Any], trainer_state: Any, *, step: int, mark: str, **kwargs: Any) -> list[float]:
    """Raise the first time that the run reaches a step; the file `mark` records it."""
    if trainer_state.global_step == step and not Path(mark).exists():
        Path(mark).touch()
        raise RuntimeError("broken on purpose")
    return [0.0] * len(completions)


def fail_always(completions: list[Any], trainer_state: Any, *, step: int, **kwargs: Any) -> list[float]:
    """Raise every time that the run reaches a step, like a bug."""
    if trainer_state.global_step == step:
        raise KeyError("a bug")
    return [0.0] * len(completions)


def falling(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
    """Return a reward that falls by 1 with each step, so that of two checkpoints the earlier one is better."""
    return [-float(trainer_state.global_step)] * len(completions)


def wait(completions: list[Any], *, seconds: float | str, **kwargs: Any) -> list[float]:
    """Sleep, and return zeros. `seconds` may be a file with the number, which a test changes while a run goes on."""
    time.sleep(float(Path(seconds).read_text()) if isinstance(seconds, str) else seconds)
    return [0.0] * len(completions)


def kill_once(completions: list[Any], trainer_state: Any, *, step: int, mark: str, **kwargs: Any) -> list[float]:
    """SIGKILL its own process the first time that the run reaches a step; `mark` gets its verifier supervisor's pid."""
    if trainer_state.global_step == step and not Path(mark).exists():
        from grpo_ray.rewards.correctness import shared_grader

        Path(mark).write_text(str(shared_grader(True, 3.0).pool.pid))
        os.kill(os.getpid(), 9)
    return [0.0] * len(completions)


def withhold_a_layer(completions: list[Any], **kwargs: Any) -> list[float]:
    """Break the weight sync: from the first step on, one layer's weights are not sent to the engine."""
    from grpo_ray.inference.engine import Engine

    if not hasattr(Engine, "whole"):
        Engine.whole = Engine._iter_named_params
        Engine._iter_named_params = lambda self: (  # type: ignore[method-assign]
            (name, weight) for name, weight in Engine.whole(self) if "layers.1." not in name
        )
    return [float(i % 2) for i in range(len(completions))]


def freeze_a_layer(completions: list[Any], **kwargs: Any) -> list[float]:
    """Break the weight sync silently: one layer is sent to the engine with its weights of the first step."""
    from grpo_ray.inference.engine import Engine

    if not hasattr(Engine, "whole"):
        Engine.whole = Engine._iter_named_params
        first: dict[str, Any] = {}
        Engine._iter_named_params = lambda self: (  # type: ignore[method-assign]
            (name, first.setdefault(name, weight.clone()) if "layers.1." in name else weight)
            for name, weight in Engine.whole(self)
        )
    return [float(i % 2) for i in range(len(completions))]


def one_in_ten_hostile(completions: list[Any], solution: list[str], *, log_metric: Any, **kwargs: Any) -> list[Any]:
    """Grade the completions with a hostile text in place of every tenth, by Math-Verify's plain verdicts."""
    from grpo_ray.rewards.registry import accuracy_reward

    hostile = [r"\boxed{9^{9^{9}}}", r"\boxed{10000000!}", r"\[ \boxed{5}" * 150, "\\boxed{" + " " * 10_000 + "5}"]
    texts = [hostile[i // 10 % len(hostile)] if i % 10 == 0 else each for i, each in enumerate(completions)]
    return accuracy_reward(texts, solution, strict=False, time_limit=1.0, log_metric=log_metric)


def vary(completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return rewards that differ within a group, so that no group has zero variance."""
    return [(len(tokens) + sum(tokens)) % 7 / 7 for tokens in completion_ids]


def on_a_gpu(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return zeros; fail in a worker that Ray has not given a GPU of its own."""
    import ray

    assert len(ray.get_gpu_ids()) == 1, "the worker has no GPU"
    return [0.0] * len(completions)


def withhold_the_adapter(completions: list[Any], **kwargs: Any) -> list[float]:
    """Break the weight sync: the engine is sent the policy without its adapter."""
    from grpo_ray.inference.engine import Engine

    def bare(engine: Engine) -> Iterator[tuple[str, Any]]:
        for name, weight in engine.model.get_base_model().named_parameters():
            if "lora_" not in name:
                yield name.replace(".base_layer", ""), weight.data

    Engine._iter_named_params = bare  # type: ignore[assignment, method-assign]
    return [float(i % 2) for i in range(len(completions))]


def hold(
    completions: list[Any], trainer_state: Any, *, steps: list[int], uploads: str, gates: str, **kwargs: Any
) -> list[float]:
    """Return zeros; at some steps, block until the file that opens the gate exists.

    Args:
        completions: One completion per row.
        trainer_state: Gives the step.
        steps: Steps at which every worker blocks.
        uploads: Name of a checkpoint whose upload also blocks, when all its files are written but it is not named yet.
        gates: Folder of the gate files: `<gate>-<address>-<rank>-reached` and `-ended` are written here,
            `<gate>-open` or `<gate>-<address>-open` are awaited.
        kwargs: TRL's other columns.
    """
    import ray.train
    from ray.util import get_node_ip_address

    from grpo_ray.storage.checkpoint_upload import CheckpointUploader

    here, rank = get_node_ip_address(), ray.train.get_context().get_world_rank()

    def gate(name: Any) -> None:
        Path(gates, f"{name}-{here}-{rank}-reached").touch()
        while not (Path(gates, f"{name}-open").exists() or Path(gates, f"{name}-{here}-open").exists()):
            time.sleep(0.05)

    if uploads and not hasattr(CheckpointUploader, "whole"):
        whole = CheckpointUploader._commit
        CheckpointUploader.whole = whole  # type: ignore[attr-defined]

        def held(self: Any, name: str) -> None:
            if name == uploads:
                gate(name)
            try:
                whole(self, name)
            finally:
                Path(gates, f"{name}-{here}-ended").touch()

        CheckpointUploader._commit = held  # type: ignore[method-assign]
    if (step := trainer_state.global_step + 1) in steps:
        gate(step)
    return [0.0] * len(completions)


def scaled(completion_ids: list[list[int]], *, file: str, **kwargs: Any) -> list[float]:
    """Return rewards times the number in a file: a reward whose code may change between two runs."""
    factor = float(Path(file).read_text())
    return [factor * ((len(tokens) + sum(tokens)) % 7) for tokens in completion_ids]
