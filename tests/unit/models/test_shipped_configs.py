"""Every shipped config fits the GPUs that it names, by the estimate, and its comments agree with the estimate."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.examples import CONFIGS
from grpo_ray.models.memory import GIB, GPU_CARDS, MemoryPlan, ModelShape, plan_memory

DOCS = Path(__file__).parents[3] / "docs"

HALF_BILLION = ModelShape(
    parameters=494_032_768,
    layers=24,
    hidden_size=896,
    intermediate_size=4864,
    query_size=896,
    key_value_size=128,
    vocabulary=151_936,
    tied_embeddings=True,
    context_length=32_768,
)
SHAPES = {
    "Qwen/Qwen2.5-0.5B": HALF_BILLION,
    "Qwen/Qwen2.5-0.5B-Instruct": HALF_BILLION,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": HALF_BILLION,
    "Qwen/Qwen2.5-7B": ModelShape(
        parameters=7_615_616_512,
        layers=28,
        hidden_size=3584,
        intermediate_size=18_944,
        query_size=3584,
        key_value_size=512,
        vocabulary=152_064,
        tied_embeddings=False,
        context_length=131_072,
    ),
    "Qwen/Qwen2.5-14B": ModelShape(
        parameters=14_770_033_664,
        layers=48,
        hidden_size=5120,
        intermediate_size=13_824,
        query_size=5120,
        key_value_size=1024,
        vocabulary=152_064,
        tied_embeddings=False,
        context_length=131_072,
    ),
    "Qwen/Qwen2.5-32B": ModelShape(
        parameters=32_763_876_352,
        layers=64,
        hidden_size=5120,
        intermediate_size=27_648,
        query_size=5120,
        key_value_size=1024,
        vocabulary=152_064,
        tied_embeddings=False,
        context_length=131_072,
    ),
    "Qwen/Qwen3-1.7B": ModelShape(
        parameters=1_720_574_976,
        layers=28,
        hidden_size=2048,
        intermediate_size=6144,
        query_size=2048,
        key_value_size=1024,
        vocabulary=151_936,
        tied_embeddings=True,
        context_length=40_960,
    ),
    "Qwen/Qwen2.5-72B": ModelShape(
        parameters=72_706_203_648,
        layers=80,
        hidden_size=8192,
        intermediate_size=29_568,
        query_size=8192,
        key_value_size=1024,
        vocabulary=152_064,
        tied_embeddings=False,
        context_length=131_072,
    ),
}
"""Shapes by the models' published config.json."""

HARDWARE = re.compile(r"# Hardware:.*?(\d+) GPUs? of (\d+ GB)")
MEMORY = re.compile(
    r"# Memory per GPU, estimated, not measured: ([\d.]+) of ([\d.]+) GiB; learner ([\d.]+), engine ([\d.]+)\n"
    r"# with space for (\d+) completions at full length; passes of ([\d,]+) tokens (with|without) recomputation"
)


def is_gpu_config(text: str) -> bool:
    """Return True for a YAML of one run with GPUs; those of stages state no estimate."""
    return "use_gpu: true" in text and "\nstages:" not in text


GPU_CONFIGS = sorted(path.name for path in CONFIGS.glob("*.yaml") if is_gpu_config(path.read_text()))


@dataclass(frozen=True)
class ShippedConfig:
    """An example with its comments."""

    text: str
    plan: MemoryPlan


def read_shipped(name: str) -> ShippedConfig:
    text = (CONFIGS / name).read_text()
    config = load_config(str(CONFIGS / name), [])
    found = HARDWARE.search(text)
    assert found, f"{name} must name its hardware as: # Hardware: 4 GPUs of 24 GB"
    engines = config.engine.replica_range[1] * config.engine.tensor_parallel_size if config.engine.is_dedicated else 0
    assert (config.cluster.max_workers + engines) % int(found[1]) == 0
    shape = SHAPES[config.model.path]
    if config.model.quantization:
        shape = dataclasses.replace(shape, quantized_parameters=linear_parameters(shape))
    return ShippedConfig(text, plan_memory(config, shape, int(GPU_CARDS[found[2]] * GIB)))


def linear_parameters(shape: ModelShape) -> int:
    """Return the number of weights of the linear layers but the output layer, without biases."""
    inner = 2 * shape.query_size + 2 * shape.key_value_size + 3 * shape.intermediate_size
    return shape.layers * shape.hidden_size * inner


def test_gpu_configs_are_found() -> None:
    assert len(GPU_CONFIGS) == 11


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_shipped_config_fits_its_gpus(name: str) -> None:
    plan = read_shipped(name).plan
    assert plan.has_margin, f"{plan.used / GIB:.1f} of {plan.gpu_bytes / GIB:.1f} GiB"


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_shipped_config_states_its_estimate(name: str) -> None:
    shipped = read_shipped(name)
    plan = shipped.plan
    comment = MEMORY.search(shipped.text)
    engine = plan.gpu_memory_utilization * plan.gpu_bytes
    sizes = [plan.used, plan.gpu_bytes, plan.estimate.learner, engine]
    at_once = plan.estimate.completions_at_once(plan.gpu_bytes, plan.gpu_memory_utilization)
    expected = (
        *(f"{size / GIB:.1f}" for size in sizes),
        str(at_once),
        f"{plan.tokens_per_micro_batch:,}",
        "with" if plan.gradient_checkpointing else "without",
    )
    assert comment and comment.groups() == expected, expected


STEP = [
    "cluster.use_gpu=true", "model.dtype=bfloat16", "engine.max_model_len=4096", "grpo.prompts_per_step=64",
    "grpo.num_generations=8", "engine.placement=dedicated",
]  # fmt: skip
FOUR = ["cluster.num_workers=4", "engine.replicas=4"]
DEDICATED = {
    "Qwen2.5-0.5B, 1 worker and 1 engine": ["cluster.num_workers=1"],
    "Qwen2.5-7B, LoRA of rank 64, 4 workers and 4 engines": [*FOUR, "model.lora={rank: 64}"],
    "Qwen2.5-7B, all weights, sharded over 4 workers, 4 engines": [*FOUR, "cluster.shard_learner=true"],
}
"""Row of the table of dedicated engines in docs/gpu-memory.md -> its settings."""


@pytest.mark.parametrize("row", DEDICATED)
def test_page_of_gpu_memory_states_the_estimate_of_dedicated_engines(row: str) -> None:
    config = load_config(None, [*STEP, *DEDICATED[row]])
    cells = []
    for card in ("24 GB", "48 GB", "80 GB", "141 GB"):
        plan = plan_memory(config, SHAPES[f"Qwen/{row.partition(',')[0]}"], int(GPU_CARDS[card] * GIB))
        at_once = plan.estimate.completions_at_once(plan.gpu_bytes, plan.gpu_memory_utilization)
        completions = config.sizes.completions_per_engine
        passes = f"{plan.tokens_per_micro_batch:,}{' R' * plan.gradient_checkpointing}"
        space = "all" if at_once >= completions else f"{at_once} of {completions}"
        cells.append(f"{passes}; {space}" if plan.has_margin and at_once else "-")
    assert f"| {row} | {' | '.join(cells)} |" in (DOCS / "gpu-memory.md").read_text()
