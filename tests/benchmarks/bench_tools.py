"""Time of a step whose completions call slow tools, against unmodified TRL, which calls them one after another.

    python tests/benchmarks/bench_tools.py

One worker, 4 completions in a step, each with three turns: two calls and an answer. Both trainers train the same steps
of the same small model on the same scripted turns, which take no time to generate: the step is bound by its tools. The
tools of TRL run in its process, ours in processes of their own. Pairs of runs; the medians of steps after the first.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

import torch  # noqa: E402
from slow_tools import multiply  # noqa: E402
from stock_trl import GROUP, train_steps  # noqa: E402
from tool_steps import LONGEST, TOOL_TOKENIZER, ToolEngine, ToolLearner, tool_problems  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

DELAYS = {
    "0.1 s": (10,),
    "0.5 s": (50,),
    "1 s": (100,),
    "2 s": (200,),
    "0.1, 0.5, 1 or 2 s at random": (10, 50, 100, 200),
}
"""Name -> times of calls, hundredths of a second."""
CALLS = 2
"""Calls of a completion, one in each turn before the answer."""


class SlowEngine(ToolEngine):
    """Engine whose completions make `CALLS` calls, and then answer."""

    delays: ClassVar[Sequence[int]] = ()
    in_tools: ClassVar[dict[int, float]] = {}
    """Row -> seconds of the calls of its completion so far."""
    slowest: ClassVar[list[float]] = []
    """Most seconds in tools of any completion, for each step: no order of calls is faster."""

    def turns(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float | None]]]:
        call_end = TOOL_TOKENIZER.convert_tokens_to_ids("<|call|>")
        turns: list[tuple[list[int], list[float | None]]] = []
        for row, prompt in enumerate(prompts):
            made = list(prompt).count(call_end)
            rng = random.Random(f"{row}/{made}/{len(prompt)}")
            delay = rng.choice(self.delays)
            call = f'<|call|>{{"name": "multiply", "arguments": {{"a": {delay}, "b": 7}}}}<|end|>'
            if made < CALLS:
                self.in_tools[row] = delay / 100 + (self.in_tools[row] if made else 0.0)
            elif row == len(prompts) - 1:
                self.slowest.append(max(self.in_tools.values()))
            text = call if made < CALLS else f"\\boxed{{{rng.randint(1, 99)}}}<|end|>"
            ids: list[int] = TOOL_TOKENIZER(text, add_special_tokens=False)["input_ids"]
            turns.append((ids, [-5.0] * len(ids)))
        return turns


class SlowTrainer(GRPOTrainer):
    """Unmodified TRL."""

    engine_class = SlowEngine


class SlowLearner(ToolLearner):
    """Our learner."""

    engine_class = SlowEngine
    overrides = (
        *ToolLearner.overrides[:1],
        "rollout.tools=['slow_tools:multiply']",
        f"rollout.max_turns={CALLS + 1}",
        "rollout.time_limit=30",
        f"grpo.max_completion_length={2 * LONGEST}",
        *ToolLearner.overrides[-1:],
    )


class StepTimes(TrainerCallback):
    """Times at which steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def step_seconds(kind: type[GRPOTrainer], steps: int) -> float:
    """Return the median time of the steps after the first."""
    arguments: dict[str, Any] = {} if kind is SlowLearner else {"tools": [multiply]}
    times = StepTimes()
    settings: dict[str, Any] = {"max_tool_calling_iterations": CALLS} if kind is SlowTrainer else {}
    with tempfile.TemporaryDirectory() as folder:
        train_steps(
            kind,
            Path(folder),
            tokenizer=TOOL_TOKENIZER,
            dataset=tool_problems(),
            arguments=arguments,
            callbacks=[times],
            per_device_train_batch_size=GROUP,
            max_steps=steps,
            max_completion_length=2 * LONGEST,
            vllm_importance_sampling_mode="token_truncate",
            **settings,
        )
    return statistics.median(after - before for before, after in zip(times.ends, times.ends[1:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--delays", nargs="+", default=list(DELAYS), choices=DELAYS, help="times of calls to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{GROUP} completions, {CALLS} calls each; median of {options.pairs} pairs; {os.cpu_count()} cores\n")
    columns = ("a call takes", "stock TRL, s", "grpo_ray, s", "ratio", "slowest completion, s")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for name in options.delays:
        SlowEngine.delays = DELAYS[name]
        SlowEngine.slowest.clear()
        pairs = [
            (step_seconds(SlowTrainer, options.steps), step_seconds(SlowLearner, options.steps))
            for _ in range(options.pairs)
        ]
        stock, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        slowest = statistics.median(SlowEngine.slowest)
        print(f"| {name} | {stock:.2f} | {ours:.2f} | {ratio:.1f} | {slowest:.1f} |", flush=True)


if __name__ == "__main__":
    main()
