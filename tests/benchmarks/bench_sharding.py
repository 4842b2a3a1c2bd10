"""Time, bytes and memory of a worker's checkpoint: sharded, gathered by one worker as before, and of a whole learner.

    python tests/benchmarks/bench_sharding.py [--parameters-millions 120] [--workers 2 4]

Real processes on the CPU with Gloo; the policy is a Llama in float32 with random weights and AdamW. Peak memory is what
the process needs beyond its memory before, from the kernel's high-water mark. Then a model for larger policies.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]

MIB, GB = 1 << 20, 1e9
MODELLED = {"7B": (7.6e9, 4, 1), "72B": (72.7e9, 32, 8)}
"""Policy -> parameters, workers, and workers on a node."""
DISK = 1.0e9
"""Assumed speed of a node's local disk, bytes per second."""


def memory() -> int:
    """Return this process's resident memory, bytes."""
    return _status("VmRSS")


def peak_of(action: Callable[[], Any]) -> tuple[float, int]:
    """Run an action; return its seconds, and the most memory that the process had beyond its memory before, bytes."""
    before = memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    started = time.perf_counter()
    action()
    return time.perf_counter() - started, _status("VmHWM") - before


def _status(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def measure(rank: int, folder: str, policy: str, way: str) -> dict[str, float]:
    """Load a policy, take one optimizer step, save and load a checkpoint in one of three ways; on each worker.

    Args:
        way: "sharded" as the learner does, "gathered" by rank 0 as accelerate does for a full state, or "whole".
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import StateDictType
    from transformers import AutoModelForCausalLM

    from grpo_ray.config.loader import load_config
    from grpo_ray.learner.sharding import load_everywhere, load_optimizer, load_policy, load_weights, save_state
    from grpo_ray.learner.trl_config import trl_arguments
    from grpo_ray.learner.trl_internals import shard_without_gpus

    torch.distributed.init_process_group("gloo")
    workers = torch.distributed.get_world_size()
    own = Path(folder, str(rank))
    args = trl_arguments(load_config(None, ["cluster.shard_learner=true", f"cluster.num_workers={workers}"]), "unused")
    args.fsdp_plugin_args["cpu_ram_efficient_loading"] = way == "sharded"
    loaded: list[Any] = []

    def load() -> None:
        everywhere = AutoModelForCausalLM.from_pretrained
        loaded.append(load_policy(policy, args) if way == "sharded" else everywhere(policy, dtype=torch.float32))

    load_seconds, load_peak = peak_of(load)
    accelerator = Accelerator(cpu=True)
    if way != "whole":
        shard_without_gpus(accelerator, args.fsdp_plugin_args)
    load_everywhere()
    model = loaded.pop()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if way != "whole":
        model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.arange(3, 35)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plugin: Any = accelerator.state.fsdp_plugin if way != "whole" else None
    if way == "gathered":
        plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)

    def save() -> None:
        own.mkdir(parents=True, exist_ok=True)
        if way == "sharded":
            save_state(own, model, optimizer.optimizer)
        elif way == "gathered":
            state = accelerator.get_state_dict(model)
            if rank == 0:
                accelerator.unwrap_model(model).save_pretrained(own, state_dict=state)
            save_fsdp_model(plugin, accelerator, model, str(own))
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(own))
        elif rank == 0:
            model.save_pretrained(own)
            torch.save(optimizer.state_dict(), own / "optimizer.pt")

    save_seconds, save_peak = peak_of(save)
    written = sum(path.stat().st_size for path in own.rglob("*") if path.is_file())
    torch.distributed.barrier()
    if rank == 0 and way == "sharded":
        for other in range(1, workers):
            shutil.copytree(Path(folder, str(other)), own, dirs_exist_ok=True)
    torch.distributed.barrier()
    whole = Path(folder, "0")

    def resume() -> None:
        if way == "sharded":
            load_weights(whole, model)
            load_optimizer(whole, model, optimizer.optimizer)
        elif way == "gathered":
            load_fsdp_model(plugin, accelerator, model, str(whole))
            load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(whole))
        else:
            from safetensors.torch import load_file

            model.load_state_dict(load_file(whole / "model.safetensors"), strict=False)
            optimizer.load_state_dict(torch.load(whole / "optimizer.pt", weights_only=True))

    resume_seconds, resume_peak = peak_of(resume)
    return {
        "load_seconds": load_seconds, "load_peak": load_peak, "save_seconds": save_seconds, "save_peak": save_peak,
        "written": written, "resume_seconds": resume_seconds, "resume_peak": resume_peak,
    }  # fmt: skip


def write_policy(folder: Path, millions: int) -> int:
    """Write a Llama of about so many million random parameters in bfloat16; return its number of parameters.

    One of less than 42 million, which is for trying the script, is narrower.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(2, round((millions - 16) / 12.6))
    width = 1024 if millions >= 42 else 256
    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=43 * width // 16, num_hidden_layers=layers,
        num_attention_heads=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def print_measured(workers: int, way: str, ranks: list[dict[str, float]]) -> None:
    """Print a row of the table: rank 0, and the largest of the others."""

    def both(name: str, unit: float = MIB) -> str:
        others = max(each[name] for each in ranks[1:])
        return f"{ranks[0][name] / unit:.0f} / {others / unit:.0f}"

    seconds = " | ".join(f"{max(each[f'{what}_seconds'] for each in ranks):.1f}" for what in ("save", "resume"))
    print(
        f"| {workers} | {way} | {both('written')} | {both('save_peak')} | {both('resume_peak')} "
        f"| {both('load_peak')} | {seconds} |",
        flush=True,
    )


def print_model() -> None:
    """Print the model for larger policies: 12 bytes per parameter, one GiB file of each worker in host memory."""
    print("\n| policy | workers | way | written by rank 0 / another, GB | host memory of its node beyond training, GB "
          "| local disk of a node, GB | seconds at 1 GB/s |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name, (parameters, workers, per_node) in MODELLED.items():
        state, part = 12 * parameters / GB, 12 * parameters / workers / GB
        twice = 16 * parameters / GB  # weights as safetensors and once more for resuming
        per_node = min(per_node, workers) if name != "7B" else workers
        rows = {
            "sharded": (part, part, min(1.1, part) * per_node, part * per_node),
            "gathered": (twice, 0.0, 8 * parameters / GB, twice),
        }
        for way, (first, other, host, disk) in rows.items():
            print(f"| {name} | {workers} | {way} | {first:.0f} / {other:.0f} | {host:.0f} | {disk:.0f} "
                  f"| {disk * GB / DISK:.0f} |")  # fmt: skip
        print(f"| {name} | {workers} | all, once | {state:.0f} | | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters-millions", type=int, default=120)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    from worker_group import run_workers

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="grpo_ray-bench-") as scratch:
        parameters = write_policy(Path(scratch, "policy"), arguments.parameters_millions)
        print(f"{parameters / 1e6:.0f}M parameters: weights {4 * parameters / MIB:.0f} MiB, with Adam's moments "
              f"{12 * parameters / MIB:.0f} MiB. Rank 0 / the largest of the others, MiB and seconds:\n")  # fmt: skip
        print("| workers | way | written | peak memory of saving | of resuming | of loading the policy | save, s "
              "| resume, s |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
        for workers in arguments.workers:
            for way in ("whole", "gathered", "sharded"):
                folder = Path(scratch, f"{workers}-{way}")
                print_measured(
                    workers, way, run_workers(measure, workers, str(folder), str(Path(scratch, "policy")), way)
                )
                shutil.rmtree(folder, ignore_errors=True)
    print_model()


if __name__ == "__main__":
    main()
