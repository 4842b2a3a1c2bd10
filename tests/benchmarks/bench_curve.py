"""Whether ours learns what stock TRL learns: `python tests/benchmarks/bench_curve.py`

The embedded task (`jobs/configs/arithmetic.yaml`), 5 seeds, ours with 2 workers and stock TRL with vLLM in one process,
from the same policy, with the same problems, reward, hyper-parameters and number of steps. A seed decides the order of
problems and what is sampled; the two systems draw from it in ways of their own, so what is compared is the mean over
seeds. Both final policies are measured by the same code, greedily with transformers on the 600 held-out problems.
Intervals are of 95 %, by Student's t over the seeds.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import HERE, Task, environment, mend_engine, unpacked_linear_layers, versions

CONFIG = HERE.parents[1] / "jobs" / "configs" / "arithmetic.yaml"
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> the 97.5 % quantile of Student's distribution."""


@dataclass(frozen=True)
class Lesson:
    """One run of one system."""

    system: str
    """ "ours" or "stock"."""
    policy: str
    folder: str
    seed: int
    steps: int


def learn_ours(lesson: Lesson) -> Path:
    """Train with grpo_ray; gives the folder of the last checkpoint."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.run import prepare

    settings = [
        "run.name=ours",
        f"run.storage_path={lesson.folder}",
        f"run.seed={lesson.seed}",
        f"model.path={lesson.policy}",
        f"grpo.max_steps={lesson.steps}",
        f"grpo.save_steps={lesson.steps}",
        "data.heldout_limit=8",  # measured below, as the other is
    ]
    with prepare(load_config(CONFIG, settings)) as run:
        run.fit(run.trainer())
    return max(Path(lesson.folder, "ours").glob("checkpoint-*"))


def learn_stock(lesson: Lesson) -> Path:
    """Train with stock TRL; gives the folder of the last checkpoint."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from grpo_ray.config.loader import load_config
    from grpo_ray.config.schema import Config
    from grpo_ray.data.arithmetic import arithmetic
    from grpo_ray.rewards.registry import load_rewards

    config: Config = load_config(CONFIG, [])
    mend_engine(lesson.policy)
    with unpacked_linear_layers():
        trainer = GRPOTrainer(
            model=lesson.policy,
            reward_funcs=load_rewards(config.rewards),
            train_dataset=Dataset.from_list(
                [{"prompt": problem.prompt, "solution": problem.solution} for problem in arithmetic("train")]
            ),
            args=GRPOConfig(
                output_dir=f"{lesson.folder}/out",
                per_device_train_batch_size=config.completions_per_step,
                gradient_accumulation_steps=1,
                num_generations=config.grpo.num_generations,
                max_completion_length=config.grpo.max_completion_length,
                learning_rate=config.grpo.learning_rate,
                max_steps=lesson.steps,
                save_steps=lesson.steps,
                logging_steps=1,
                seed=lesson.seed,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=512,
                report_to="none",
                disable_tqdm=True,
            ),
        )
    trainer.train()
    return Path(lesson.folder, "out", f"checkpoint-{lesson.steps}")


def accuracy(policy: Path | str) -> float:
    """Share of the held-out problems that a policy solves greedily."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.arithmetic import arithmetic
    from grpo_ray.models.tokenizer import load_tokenizer
    from grpo_ray.rewards.registry import heldout_reward

    config, problems = load_config(CONFIG, []), list(arithmetic("heldout"))
    tokenizer = load_tokenizer(str(policy))
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    asked = tokenizer.apply_chat_template(
        [problem.prompt for problem in problems],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        out = model.generate(**asked, do_sample=False, max_new_tokens=config.grpo.max_completion_length)
    texts = tokenizer.batch_decode(out[:, asked["input_ids"].size(1) :], skip_special_tokens=True)
    verdicts = heldout_reward(config.rewards)(completions=texts, solution=[problem.solution for problem in problems])
    return sum(verdict or 0.0 for verdict in verdicts) / len(problems)


def work(lesson: Lesson) -> None:
    """Take a lesson, and write what came of it."""
    made = {"ours": learn_ours, "stock": learn_stock}[lesson.system](lesson)
    Path(lesson.folder, "result.json").write_text(json.dumps(accuracy(made)))


def start(lesson: Lesson, threads: int) -> "subprocess.Popen[Any]":
    """Take a lesson in processes of its own."""
    folder = Path(lesson.folder)
    folder.mkdir(parents=True)
    (folder / "lesson.json").write_text(json.dumps(vars(lesson)))
    said = environment(Task("", "", "", threads=threads))
    with open(folder / "output.txt", "w") as output:
        command = [sys.executable, str(Path(__file__)), "--lesson", str(folder / "lesson.json")]
        return subprocess.Popen(command, env=said, stdout=output, stderr=subprocess.STDOUT)


def result(lesson: Lesson, process: "subprocess.Popen[Any]") -> float:
    """Wait for a lesson's end; its accuracy. Raises RuntimeError with the end of what it printed."""
    if process.wait():
        raise RuntimeError(f"{lesson}: {Path(lesson.folder, 'output.txt').read_text()[-3000:]}")
    return float(json.loads(Path(lesson.folder, "result.json").read_text()))


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its confidence interval."""
    return statistics.mean(values), STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--keep", type=Path, help="where to work and leave what was written")
    parser.add_argument("--lesson", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lesson:
        work(Lesson(**json.loads(arguments.lesson.read_text())))
        return
    from grpo_ray.models.toy_policy import build_toy_policy

    print(versions(), flush=True)
    scratch = tempfile.mkdtemp(prefix="grpo_ray-curve-")
    root, found = arguments.keep or Path(scratch), {"ours": [], "stock": []}
    try:
        policy = str(build_toy_policy())
        print(f"before: {accuracy(policy):.3f}; {arguments.steps} steps", flush=True)
        for seed in range(1, arguments.seeds + 1):
            for system in found:
                began = time.perf_counter()
                lesson = Lesson(system, policy, str(root / f"{system}-{seed}"), seed, arguments.steps)
                threads = max(1, (os.cpu_count() or 1) // (2 if system == "ours" else 1))
                found[system].append(result(lesson, start(lesson, threads)))
                seconds = time.perf_counter() - began
                print(f"seed {seed} {system:6} {found[system][-1]:.3f} {seconds:5.0f} s with start-up", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.seeds < 2:
        return
    for system, values in found.items():
        mean, half = interval(values)
        print(f"{system:6} {mean:.3f} +- {half:.3f}   " + " ".join(f"{value:.3f}" for value in values))
    difference = statistics.mean(found["ours"]) - statistics.mean(found["stock"])
    # As many degrees of freedom as one system has: no assumption that both vary alike.
    variance = sum(statistics.variance(values) / len(values) for values in found.values())
    half = STUDENT[arguments.seeds - 1] * math.sqrt(variance)
    verdict = "equal within the interval" if abs(difference) <= half else "NOT equal within the interval"
    print(f"ours - stock: {difference:+.3f} +- {half:.3f}: {verdict}")


if __name__ == "__main__":
    main()
