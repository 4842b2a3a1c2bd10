"""Final held-out accuracy of grpo_ray and of stock TRL: `python tests/benchmarks/bench_curve.py`

The embedded task (`jobs/configs/arithmetic.yaml`) with 5 seeds: grpo_ray with 2 workers, and stock TRL with vLLM in one
process, from the same policy, with the same problems, reward, hyper-parameters and number of steps. A seed determines
the order of problems and the samples. The two systems use it differently, so only the means over seeds are compared.
Both final policies are measured by the same code: greedy decoding with transformers on the 600 held-out problems.
Intervals are 95 % intervals of Student's t over the seeds.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import HERE, Task, environment, unpacked_linear_layers, use_our_engine_settings, versions

CONFIG = HERE.parents[1] / "jobs" / "configs" / "arithmetic.yaml"
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Degrees of freedom -> the 97.5 % quantile of Student's distribution."""


@dataclass(frozen=True)
class Trial:
    """One run of one system."""

    system: str
    """ "ours" or "stock"."""
    policy: str
    folder: str
    seed: int
    steps: int
    problems: int
    """Held-out problems on which the final policy is measured."""
    overrides: Sequence[str]
    """Further settings of both systems."""


def train_ours(trial: Trial) -> Path:
    """Train with grpo_ray; return the folder of the last checkpoint."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.run import prepare

    settings = [
        "run.name=ours",
        f"run.storage_path={trial.folder}",
        f"run.seed={trial.seed}",
        f"model.path={trial.policy}",
        f"grpo.max_steps={trial.steps}",
        f"grpo.save_steps={trial.steps}",
        "data.heldout_limit=8",  # accuracy is measured below, by the same code for both systems
        *trial.overrides,
    ]
    with prepare(load_config(CONFIG, settings)) as run:
        run.fit(run.trainer())
    return max(Path(trial.folder, "ours").glob("checkpoint-*"))


def train_stock(trial: Trial) -> Path:
    """Train with stock TRL; return the folder of the last checkpoint."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from grpo_ray.config.loader import load_config
    from grpo_ray.config.schema import Config
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.rewards.registry import load_rewards

    config: Config = load_config(CONFIG, trial.overrides)
    use_our_engine_settings(Task(trial.policy, "", trial.folder))
    with unpacked_linear_layers():
        trainer = GRPOTrainer(
            model=trial.policy,
            reward_funcs=load_rewards(config.rewards),
            train_dataset=Dataset.from_list(
                [{"prompt": problem.prompt, "solution": problem.solution} for problem in arithmetic_problems("train")]
            ),
            args=GRPOConfig(
                output_dir=f"{trial.folder}/out",
                per_device_train_batch_size=config.sizes.completions_per_step,
                gradient_accumulation_steps=1,
                num_generations=config.grpo.num_generations,
                max_completion_length=config.grpo.max_completion_length,
                learning_rate=config.grpo.learning_rate,
                max_steps=trial.steps,
                save_steps=trial.steps,
                logging_steps=1,
                seed=trial.seed,
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
    return Path(trial.folder, "out", f"checkpoint-{trial.steps}")


def accuracy(policy: Path | str, count: int) -> float:
    """Measure the share of the first `count` held-out problems that a policy solves with greedy decoding."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.models.tokenizer import load_tokenizer
    from grpo_ray.rewards.registry import heldout_correctness

    config, problems = load_config(CONFIG, []), list(arithmetic_problems("heldout"))[:count]
    tokenizer = load_tokenizer(str(policy))
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    inputs = tokenizer.apply_chat_template(
        [problem.prompt for problem in problems],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=config.grpo.max_completion_length)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    reward = heldout_correctness(config.rewards)
    assert reward is not None
    verdicts = reward(completions=texts, solution=[problem.solution for problem in problems])
    return sum(verdict or 0.0 for verdict in verdicts) / len(problems)


def run_trial(trial: Trial) -> None:
    """Train, and write the accuracy to `result.json`."""
    checkpoint = {"ours": train_ours, "stock": train_stock}[trial.system](trial)
    Path(trial.folder, "result.json").write_text(json.dumps(accuracy(checkpoint, trial.problems)))


def measure(trial: Trial, threads: int, in_this_process: bool) -> float:
    """Run a trial and return its accuracy: one of ours in this process, or any in processes of its own.

    Raises:
        RuntimeError: The trial failed; the message has the end of its output.
    """
    if in_this_process and trial.system == "ours":
        return accuracy(train_ours(trial), trial.problems)
    return result(trial, start(trial, threads))


def start(trial: Trial, threads: int) -> "subprocess.Popen[Any]":
    """Start a trial in processes of its own."""
    folder = Path(trial.folder)
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps(vars(trial)))
    with open(folder / "output.txt", "w") as output:
        command = [sys.executable, str(Path(__file__)), "--trial", str(folder / "trial.json")]
        return subprocess.Popen(
            command, env=environment(Task("", "", "", threads=threads)), stdout=output, stderr=subprocess.STDOUT
        )


def result(trial: Trial, process: "subprocess.Popen[Any]") -> float:
    """Wait for the end of a trial; return its accuracy.

    Raises:
        RuntimeError: The trial failed; the message has the end of its output.
    """
    if process.wait():
        raise RuntimeError(f"{trial}: {Path(trial.folder, 'output.txt').read_text()[-3000:]}")
    return float(json.loads(Path(trial.folder, "result.json").read_text()))


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its confidence interval."""
    return statistics.mean(values), STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--problems", type=int, default=600, help="held-out problems of each measurement")
    parser.add_argument("--here", action="store_true", help="train ours in this process, to try the script")
    parser.add_argument("--keep", type=Path, help="folder for all files, kept afterwards")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of both systems")
    parser.add_argument("--trial", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.trial:
        run_trial(Trial(**json.loads(arguments.trial.read_text())))
        return
    from grpo_ray.models.embedded_policy import embedded_policy

    print(versions(), flush=True)
    scratch = tempfile.mkdtemp(prefix="grpo_ray-curve-")
    root = arguments.keep or Path(scratch)
    accuracies: dict[str, list[float]] = {"ours": [], "stock": []}
    try:
        policy = str(embedded_policy())
        print(f"before: {accuracy(policy, arguments.problems):.3f}; {arguments.steps} steps", flush=True)
        for seed in range(1, arguments.seeds + 1):
            for system in accuracies:
                began = time.perf_counter()
                trial = Trial(
                    system, policy, str(root / f"{system}-{seed}"), seed, arguments.steps, arguments.problems,
                    arguments.overrides,
                )  # fmt: skip
                threads = max(1, (os.cpu_count() or 1) // (2 if system == "ours" else 1))
                accuracies[system].append(measure(trial, threads, arguments.here))
                seconds = time.perf_counter() - began
                print(f"seed {seed} {system:6} {accuracies[system][-1]:.3f} {seconds:5.0f} s with start-up", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if arguments.seeds < 2:
        return
    for system, values in accuracies.items():
        mean, half = interval(values)
        print(f"{system:6} {mean:.3f} +- {half:.3f}   " + " ".join(f"{value:.3f}" for value in values))
    difference = statistics.mean(accuracies["ours"]) - statistics.mean(accuracies["stock"])
    # With the degrees of freedom of one system: no assumption of equal variances.
    variance = sum(statistics.variance(values) / len(values) for values in accuracies.values())
    half = STUDENT[arguments.seeds - 1] * math.sqrt(variance)
    verdict = "equal within the interval" if abs(difference) <= half else "NOT equal within the interval"
    print(f"ours - stock: {difference:+.3f} +- {half:.3f}: {verdict}")


if __name__ == "__main__":
    main()
