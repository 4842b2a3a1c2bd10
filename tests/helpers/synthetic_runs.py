"""Run folder of any length in the format of a run, written in seconds, which grows like one that goes on.

python tests/helpers/synthetic_runs.py FOLDER [--steps 10000] [--groups 10] [--tools]
"""

import argparse
import json
import re
from array import array
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from grpo_ray.storage.records.conversation_columns import ConversationRecord, MessageRecord, bound_messages
from grpo_ray.storage.records.group_columns import groups_table
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.heldout_files import HeldoutRecord, write_heldout
from grpo_ray.storage.records.rollout_files import FOLDER, ROW_GROUP
from grpo_ray.storage.records.tokens import TokenRecord
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.profiler import PHASES

STARTED = 1_700_000_000.0
STEP_SECONDS = 30.0
METRICS = 30
"""Metrics per row besides the named ones."""
SENTENCES = (
    "First, add the two numbers in the units place and carry the one.",
    "Let $x$ be the number of apples; then $2x + 3 = 17$, so $x = 7$.",
    "Wait, the question asks for the total, not for the difference.",
    "By symmetry both roots have the same absolute value.",
    "Check: $7 \\cdot 8 = 56$ and $56 - 14 = 42$, as required.",
    "The denominator cannot be zero, which excludes $x = 1$.",
)


@dataclass
class SyntheticRun:
    """A run folder that is written step by step, without a model: numbers and texts follow from the step."""

    storage: str
    name: str = "run"
    groups_per_step: int = 10
    num_generations: int = 8
    save_steps: int = 100
    num_problems: int = 5000
    max_steps: int = 10_000
    tools: bool = False
    """True: the sampled completions are conversations with a calculator."""
    started: float = STARTED
    """Time of the launch, seconds since 1970."""
    steps: int = field(default=0, init=False)
    """Steps taken so far."""

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.storage, self.name)
        config = {
            "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16"},
            "data": {"train": "deepmath", "heldout": "math500"},
            "grpo": {
                "max_steps": self.max_steps,
                "prompts_per_step": self.groups_per_step,
                "num_generations": self.num_generations,
                "save_steps": self.save_steps,
            },
            "cluster": {"num_workers": 8, "use_gpu": True},
            "run": {"name": self.name, "storage_path": str(self.storage)},
        }
        self.folder.write_text(yaml.safe_dump(config), "config.yaml")
        self.folder.write_json({"pass_at_1": {"value": 0.31, "low": 0.29, "high": 0.33}}, "heldout_before.json")
        self.write_heldout(0)
        self._append("events.jsonl", [
            {"event": "launched", "at": self.started},
            {"event": "began", "at": self.started + 60, "step": 0, "checkpoint": None, "workers": 8},
            {"event": "training", "at": self.started + 90, "step": 0},
        ])  # fmt: skip

    def grow(self, steps: int) -> None:
        """Take more steps: rows of metrics, events, and the rollouts of each complete checkpoint interval."""
        first, last = self.steps + 1, self.steps + steps
        self._append("metrics.jsonl", [self.metrics_row(step) for step in range(first, last + 1)])
        self._append(
            "events.jsonl",
            [
                {"event": "step", "at": self.started + 90 + STEP_SECONDS * step, "step": step}
                for step in range(first, last + 1)
            ],
        )
        for save in range(first + (-first) % self.save_steps, last + 1, self.save_steps):
            self._write_rollouts(save - self.save_steps + 1, save)
            metrics = self.metrics_row(save)
            if save % (10 * self.save_steps) == 0:
                self.write_heldout(save)
            manifest = {"metrics": metrics, "serial": save // self.save_steps, "files": {}}
            self.folder.write_json(manifest, metrics["checkpoint"], "manifest.json")
            if save > 3 * self.save_steps:  # the run keeps few
                self.folder.delete_folder(f"checkpoint-{save - 3 * self.save_steps:06d}")
        self.steps = last

    def rewind(self, step: int) -> None:
        """Cut the metrics behind a step, as a run that resumes from its checkpoint does."""
        lines = self.folder.read_text("metrics.jsonl").splitlines(keepends=True)
        self.folder.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), "metrics.jsonl")
        self.steps = step

    def metrics_row(self, step: int) -> dict[str, Any]:
        """Make the metrics of a step: a noisy reward that rises, and every metric of the page."""
        noise = np.random.default_rng(step).normal(size=METRICS + 6)
        progress = 1 - np.exp(-3 * step / self.max_steps)
        row: dict[str, Any] = {
            "step": step,
            "reward/mean": float(0.3 + 0.45 * progress + 0.03 * noise[0]),
            "completion/length_mean": float(420 + 90 * progress + 15 * noise[1]),
            "completion/truncated_share": float(abs(0.04 + 0.01 * noise[2])),
            "group/equal_share": float(np.clip(0.35 + 0.2 * progress + 0.05 * noise[3], 0, 1)),
            "policy/entropy": float(0.9 - 0.5 * progress + 0.02 * noise[4]),
            "learner/gradient_norm": float(np.exp(0.3 * noise[5])),
            "engine/logprob_gap_mean": 4e-3 * float(np.exp(0.2 * noise[0])),
            "step/seconds": STEP_SECONDS + float(noise[1]),
            "step/completions_per_second": 2.6,
        }
        row |= {f"phase/{phase}": STEP_SECONDS / len(PHASES) for phase in PHASES}
        row |= {f"extra/metric_{number:02d}": float(noise[6 + number]) for number in range(METRICS)}
        if step % self.save_steps == 0:
            accuracy = float(0.31 + 0.22 * progress + 0.008 * noise[2])
            row |= {"heldout/accuracy": accuracy, "heldout/low": accuracy - 0.02, "heldout/high": accuracy + 0.02}
            row |= {"checkpoint": f"checkpoint-{step:06d}"}
        return row

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        assert self.folder.local is not None
        self.folder.local.mkdir(parents=True, exist_ok=True)
        with open(self.folder.local / name, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _write_rollouts(self, first: int, last: int) -> None:
        """Write the groups of steps as one file, without `GroupRecord`: its lists take minutes for 10^5 groups."""
        random = np.random.default_rng(first)
        steps = np.repeat(np.arange(first, last + 1), self.groups_per_step)
        rows, size = len(steps), self.num_generations
        number = np.arange((first - 1) * self.groups_per_step, last * self.groups_per_step)
        problems = number * 7919 % self.num_problems
        solve_rate = np.clip(problems / self.num_problems + 0.3 * last / self.max_steps - 0.15, 0, 1)
        correct = (random.random((rows, size)) < solve_rate[:, None]).astype(np.float32)
        with_texts = set(range(0, rows, self.groups_per_step))  # the first group of each step
        offsets = np.arange(0, rows * size + 1, size, dtype=np.int32)

        def lists(values: np.ndarray, type_: pa.DataType) -> pa.Array:
            return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), type=type_))

        columns = {
            "step": pa.array(steps),
            "epoch": pa.array(number // self.num_problems),
            "problem": pa.array([problem_id(problem) for problem in problems.tolist()]),
            "rewards": lists(correct, pa.float32()),
            "correct": lists(correct, pa.float32()),
            "lengths": lists(random.integers(40, 900, rows * size), pa.int32()),
            "truncated": lists(random.random(rows * size) < 0.03, pa.bool_()),
            "trained": pa.array(np.full(rows, True)),
        }
        samples = self._samples(problems[:: self.groups_per_step], correct[:: self.groups_per_step])
        # Null in all rows but the first one of each step.
        places = pa.array([row // self.groups_per_step if row in with_texts else None for row in range(rows)])
        arrays = [
            columns[name] if name in columns else samples[name].combine_chunks().take(places)
            for name in samples.column_names
        ]
        schema = samples.schema
        arrays = [each.cast(field.type) for each, field in zip(arrays, schema, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=schema)
        table = table.sort_by([("step", "ascending"), ("epoch", "ascending"), ("problem", "ascending")])
        path = self.folder.path(FOLDER, f"steps-{first:08d}-{last:08d}.parquet")
        self.folder.filesystem.create_dir(self.folder.path(FOLDER), recursive=True)
        with self.folder.filesystem.open_output_stream(path) as stream:
            pq.write_table(table, stream, row_group_size=ROW_GROUP)

    def _samples(self, problems: np.ndarray, correct: np.ndarray) -> pa.Table:
        """Make the groups with texts of some problems; `correct` is (groups, num_generations)."""
        groups = []
        for problem, verdicts in zip(problems.tolist(), correct.tolist(), strict=True):
            answers = [answer(problem % 64, bool(right), each) for each, right in enumerate(verdicts)]
            conversations = None
            if self.tools:
                made = [conversation(problem % 64, bool(right), each) for each, right in enumerate(verdicts)]
                answers = [(text, tokens) for text, tokens, _ in made]
                conversations = tuple(record for _, _, record in made)
            centred = np.array(verdicts) - np.mean(verdicts)
            groups.append(
                GroupRecord(
                    step=0,
                    epoch=0,
                    problem="",
                    rewards=(),
                    correct=(),
                    lengths=(),
                    truncated=(),
                    prompt=prompt_of(problem % 64),
                    completions=tuple(text for text, _ in answers),
                    conversations=conversations,
                    sample="signal" if centred.any() else "first",
                    advantages=tuple((centred / (centred.std() + 1e-4)).tolist()),
                    tokens=tuple(
                        tokens if centred.any() else replace(tokens, learner_logps=None) for _, tokens in answers
                    ),
                )
            )
        return groups_table(groups, with_tokens=True, with_conversations=self.tools)

    def write_heldout(self, step: int, problems: int = 200) -> None:
        """Write a measurement of held-out problems, of which more are solved the later the step is."""
        random = np.random.default_rng(step)
        progress = 1 - np.exp(-3 * step / self.max_steps)
        records = []
        for number in range(problems):
            right = bool(random.random() < np.clip(number / problems + 0.5 * progress - 0.2, 0, 1))
            text, tokens = answer(number % 64, right, step % 7)
            conversations = None
            if self.tools:
                text, tokens, record = conversation(number % 64, right, step % 7)
                conversations = (record,)
            records.append(
                HeldoutRecord(
                    problem=problem_id(number + 10**6),
                    correct=(float(right),),
                    lengths=(len(tokens.ends),),
                    truncated=(False,),
                    prompt=prompt_of(number % 64),
                    solution=f"${solution_of(number % 64)}$",
                    completions=(text,),
                    conversations=conversations,
                )
            )
        policy = f"checkpoint-{step:06d}" if step else ""
        write_heldout(self.folder, "heldout", step, records, policy=policy, conditions={"problems": problems})


def problem_id(problem: int) -> str:
    """Return 16 hexadecimal digits that look like the id of a real problem."""
    return f"{(problem + 1) * 0x9E3779B97F4A7C15 % 2**64:016x}"


def prompt_of(problem: int) -> str:
    return f"A shop sells {problem % 9 + 10} apples a day for {problem // 9 + 2} days. How many apples is that?"


def solution_of(problem: int) -> int:
    return (problem % 9 + 10) * (problem // 9 + 2)


@cache
def answer(problem: int, right: bool, variant: int) -> tuple[str, TokenRecord]:
    """Return a completion and its tokens, which are its words."""
    number = solution_of(problem) + (0 if right else 1 + variant)
    body = " ".join(SENTENCES[(problem + variant + place) % len(SENTENCES)] for place in range(5))
    text = f"{body}\n\nThe answer is $\\boxed{{{number}}}$."
    words = re.findall(r"\s*\w+|\s*\W", text)
    random = np.random.default_rng(problem * 100 + variant)
    engine = -random.exponential(0.6, len(words))
    tokens = TokenRecord(
        text="".join(words).encode(),
        ends=array("i", np.cumsum([len(word.encode()) for word in words]).tolist()),
        head=len(words),
        engine_logps=array("f", engine),
        learner_logps=array("f", engine + random.normal(0, 0.12, len(words))),
        masked=bytes(random.random(len(words)) < 0.04),
    )
    return text, tokens


@cache
def conversation(problem: int, right: bool, variant: int) -> tuple[str, TokenRecord, ConversationRecord]:
    """Return a completion that calls a calculator, its tokens with those of results marked, and its record.

    The second variant has a call that fails, and the third one a long result.
    """
    days, apples = problem // 9 + 2, problem % 9 + 10
    text, own = answer(problem, right, variant)
    parts = [
        MessageRecord("assistant", "", SENTENCES[variant % len(SENTENCES)]),
        MessageRecord("call", "calculator", json.dumps({"expression": f"{apples} * {days}"})),
        MessageRecord("tool", "calculator", str(apples * days)),
    ]
    if variant == 1:
        parts[1:1] = [MessageRecord("call", "calculate", json.dumps({"x": [apples, days]})),
                      MessageRecord("tool", "calculate", "{'error': 'Tool calculate not found.'}")]  # fmt: skip
    if variant == 2:
        table = "\n".join(f"{day:3d} days: {apples * day} apples" for day in range(1, 60))
        parts[2:3] = [MessageRecord("tool", "calculator", f"{table}\nNinety-nine rows omitted")]
    written = [MessageRecord(each.role, each.name, each.content + "\n") for each in parts]
    words = [(word, each.role == "tool") for each in written for word in re.findall(r"\s*\w+|\s*\W", each.content)]
    count = len(words)
    zeros, values = array("f", bytes(4 * count)), -np.random.default_rng(count).exponential(0.6, count)
    policy = np.array([not is_result for _, is_result in words])
    ends = np.cumsum([len(word.encode()) for word, _ in words])
    before = array("f", np.where(policy, values, 0))
    tokens = TokenRecord(
        text="".join(word for word, _ in words).encode() + own.text,
        ends=array("i", [*ends.tolist(), *(int(ends[-1]) + end for end in own.ends)]),
        head=count + len(own.ends),
        engine_logps=before + own.engine_logps,
        learner_logps=before + (own.learner_logps or zeros),
        masked=bytes(is_result for _, is_result in words) + own.masked,
        results=bytes(is_result for _, is_result in words) + bytes(len(own.ends)),
    )
    calls = sum(each.role == "call" for each in parts)
    record = ConversationRecord(
        turns=calls + 1,
        calls=calls,
        call_errors=int(variant == 1),
        tool_seconds=0.012 * calls,
        ended="stop",
        messages=bound_messages([*parts, MessageRecord("assistant", "", text)], 4096),
    )
    lines = [f"[{each.role} {each.name}] {each.content}" if each.name else each.content for each in parts]
    return "\n".join([*lines, text]), tokens, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--tools", action="store_true", help="completions are conversations")
    arguments = parser.parse_args()
    target = arguments.folder.resolve()
    SyntheticRun(str(target.parent), target.name, groups_per_step=arguments.groups, tools=arguments.tools).grow(
        arguments.steps
    )


if __name__ == "__main__":
    main()
