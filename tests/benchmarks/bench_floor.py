"""Step time compared with its lower bound, the floor: `python tests/benchmarks/bench_floor.py`

The floor is the time of the work that no design avoids: the engine alone generating as many tokens for the same number
of requests (without per-request seeds, which cost time, and with our sampler, which saves time), and forward and
backward alone on the completions that carry gradient. Everything else is left out: Ray, weight sync, rewards, gradient
exchange, optimizer. First our run takes its steps (`peers.py`). Then two processes with as many threads replay them at
the same time, each its own completions with the same lengths. The learner's part is measured with 1, 2, 4, 8 and 16
rows of similar length per pass, and the fastest is used. The floor of a step is that of its slower process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from length_model import make_files, problems
from peers import GROUP, MEASURED, PATTERNS, PROMPTS, Task, environment, free_port, read_record, run, versions

GOAL = 1.15
"""Ratio of our step time to the floor."""
ROWS = (1, 2, 4, 8, 16)
"""Rows per pass that are tried."""


def replay(task: Task) -> None:
    """Replay one process's steps; write the seconds of generation and of learning of each step."""
    import torch

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.arguments import llm_arguments
    from grpo_ray.inference.cpu_sampler import install_cpu_sampler
    from grpo_ray.inference.vllm_internals import token_sampler

    torch.set_num_threads(task.threads)
    torch.distributed.init_process_group("gloo")
    rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in problems(PROMPTS * task.steps)], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    calls = [json.loads(line) for line in Path(task.folder, f"clock.{rank}").read_text().splitlines()]
    engine = LLM(
        **llm_arguments(task.model, load_config(None, [f"engine.max_model_len={task.context}"])),
        max_num_seqs=GROUP * PROMPTS // workers,
        distributed_executor_backend="external_launcher",
    )
    install_cpu_sampler(token_sampler(engine))
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).train()
    own = PROMPTS // workers
    seconds: dict[str, list[float]] = {name: [] for name in ("generate", *(f"learn {rows}" for rows in ROWS))}
    patterns = [pattern for pattern, steps in task.plan for _ in range(steps)]
    groups = [
        PATTERNS[pattern][(step * PROMPTS + place) % len(PATTERNS[pattern])]
        for pattern, steps in task.plan
        for step in range(steps)
        for place in range(PROMPTS)
    ]
    for step, call in enumerate(calls):
        first = step * PROMPTS + rank * own
        requested = [prompt for prompt in prompts[first : first + own] for _ in range(GROUP)]
        torch.distributed.barrier()
        began = time.perf_counter()
        completions = generate(engine, requested, call["lengths"])
        seconds["generate"].append(time.perf_counter() - began)
        signal = [len(set(groups[first + place])) > 1 for place in range(own) for _ in range(GROUP)]
        rows = [(p, c) for p, c, has in zip(requested, completions, signal, strict=True) if has]
        for width in ROWS:
            torch.distributed.barrier()
            seconds[f"learn {width}"].append(learn(model, rows, width, tokenizer.pad_token_id))
    Path(task.folder, f"floor.{rank}").write_text(json.dumps({"patterns": patterns, "seconds": seconds}))


def generate(engine: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Generate as many tokens for each prompt as the run sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = SamplingParams(
            # What a run needs and no more: it reads tokens, and log-probabilities as one list of numbers.
            max_tokens=length, ignore_eos=True, logprobs=0, output_kind=kind, detokenize=False, flat_logprobs=True,
        )  # fmt: skip
        engine.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    finished = {}
    while engine.llm_engine.has_unfinished_requests():
        finished.update({int(o.request_id): list(o.outputs[0].token_ids) for o in engine.llm_engine.step()})
    engine.reset_prefix_cache()  # as after each weight sync of the run
    return [finished[number] for number in range(len(prompts))]


def learn(model: Any, rows: list[tuple[list[int], list[int]]], width: int, pad: int) -> float:
    """Time forward and backward of the completions' log-probabilities.

    Args:
        model: Causal language model.
        rows: Prompt ids and completion ids of each completion.
        width: Rows of similar length per pass.
        pad: Padding id.

    Returns:
        Seconds.
    """
    import torch

    ordered = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    began = time.perf_counter()
    for at in range(0, len(ordered), width):
        part = ordered[at : at + width]
        longest = max(len(prompt) + len(completion) for prompt, completion in part)
        ids = torch.full((len(part), longest), pad)
        read, counts = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, completion) in enumerate(part):  # padded on the right, so no token attends to padding
            end = len(prompt) + len(completion)
            ids[row, :end] = torch.tensor(prompt + completion)
            read[row, :end] = 1
            counts[row, len(prompt) - 1 : end - 1] = True
        hidden = model.model(ids, attention_mask=read).last_hidden_state
        logits = model.lm_head(hidden[counts])
        loss = torch.nn.functional.cross_entropy(logits, ids.roll(-1, dims=1)[counts], reduction="sum")
        (loss / 1000).backward()
    model.zero_grad()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=int, default=3, help="warm-up steps, not counted")
    parser.add_argument("--steps", type=int, nargs=3, default=(6, 6, 13), help="steps of each pattern")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of our run")
    parser.add_argument("--tiny", action="store_true", help="a tiny model with short completions, to try the script")
    parser.add_argument("--keep", type=Path, help="folder for all files, kept afterwards")
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        replay(Task(**json.loads(arguments.replay.read_text())))
        return
    print(versions(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        lengths = make_files(root, arguments.tiny)
        plan = [("every", arguments.warm), *zip(MEASURED, arguments.steps, strict=True)]
        plan[-1] = (plan[-1][0], plan[-1][1] + 1)  # the last step has no successor to end its period
        task = Task(
            str(root / "model"), str(root / "problems.jsonl"), str(root / "ours"), plan=plan,
            workers=arguments.workers, threads=arguments.threads, micro_batches=arguments.micro,
            longest=lengths.longest, context=lengths.context,
        )  # fmt: skip
        record = run("ours", task, in_this_process=arguments.tiny)
        print(f"our run has finished: {len(record.periods)} steps in {sum(record.periods):.0f} s", flush=True)
        start_replay(task)
        report(task)


def start_replay(task: Task) -> None:
    """Run the replaying processes to their end."""
    file = Path(task.folder, "replay.json")
    file.write_text(json.dumps(asdict(task)))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={task.workers}"]
    command += [f"--master-port={free_port()}", str(Path(__file__)), "--replay", str(file)]
    with open(Path(task.folder, "replay.txt"), "w") as output:
        done = subprocess.run(command, env=environment(task), stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(Path(task.folder, "replay.txt").read_text()[-3000:])


def report(task: Task) -> None:
    """Print our step, its floor and their ratio for each pattern."""
    periods = read_record(task).periods
    results = [json.loads(Path(task.folder, f"floor.{rank}").read_text()) for rank in range(task.workers)]
    patterns, seconds = results[0]["patterns"], [process["seconds"] for process in results]
    warm = task.plan[0][1]

    def slowest(part: str, step: int) -> float:
        return max(process[part][step] for process in seconds)

    print(f"{'signal':12} {'ours':>9} {'floor':>9} {'engine':>9} {'learner':>9} {'rows':>5} {'ratio':>7}   goal {GOAL}")
    for pattern in MEASURED:
        # A period lasts from a step's rewards to the next one's: this step's learning and the next step's generation.
        steps = [step for step in range(warm, len(periods)) if patterns[step] == pattern]
        own = sum(periods[step] for step in steps)
        width = min(ROWS, key=lambda rows: sum(slowest(f"learn {rows}", step) for step in steps))
        floor = sum(
            max(process["generate"][step + 1] + process[f"learn {width}"][step] for process in seconds)
            for step in steps
        )
        engine, learner = (
            sum(slowest(part, step + shift) for step in steps) / len(steps)
            for part, shift in (("generate", 1), (f"learn {width}", 0))
        )
        print(
            f"{pattern:12} {own / len(steps):7.2f} s {floor / len(steps):7.2f} s {engine:7.2f} s {learner:7.2f} s "
            f"{width:5} {own / floor:6.2f}x"
        )


if __name__ == "__main__":
    main()
