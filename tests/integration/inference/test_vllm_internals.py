"""Tests of the private parts of vLLM that the package uses: unchanged code, and replacement and restoration."""

import inspect
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from library_digest import digest
from vllm.config import vllm as settings
from vllm.config.lora import MaxLoRARanks
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p, random_sample
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.worker_base import WorkerBase

from grpo_ray.config.peft_fields import REQUEST_RANKS
from grpo_ray.inference.cpu_packing import repackable_layers
from grpo_ray.inference.lora_requests import base_layers, slot_rank
from grpo_ray.inference.vllm_internals import (
    SHARED_MEMORY_FOLDER,
    bound_stream,
    bound_to_current_stream,
    named_shared_memory,
    pack_linear_weight,
    prefer_second_runner,
    replaced_linear_packing,
    runner_number,
    unlink_shared_memory,
)

# On failure: read vLLM's change, check that the package's code is still right, then write the new digest here.
DIGESTS = {
    TopKTopPSampler.forward_native: "1e25771591a6",
    TopKTopPSampler.forward_cpu: "e17ce26d43cf",
    apply_top_k_top_p: "9c60cfe73d70",
    random_sample: "b61922ea8e06",
    Sampler.forward: "4ddbe156abd2",
    Sampler.sample: "bd7549a66763",
    utils.dispatch_cpu_unquantized_gemm: "a77ee9c59f0f",
    UnquantizedLinearMethod.process_weights_after_loading: "828f63e65b6d",
    UnquantizedLinearMethod.apply: "2336eebebce7",
    UnquantizedEmbeddingMethod.process_weights_after_loading: "5060745d158e",
    _CPUSHMDistributed.__init__: "debdb2113bfb",
    _CPUSHMDistributed.make_group_name: "fe4734943ad2",
    AsyncOutput.__init__: "b86a504e0467",
    vars(SecondModelRunner)["main_stream"].func: "13a0821846c5",
    initialize_layerwise_reload: "c2dd3e6ff40e",
    LoRAModelManager.activate_adapter: "d55609d024fd",
    LoRAModelManager.remove_all_adapters: "3740c6775064",
    LRUCacheLoRAModelManager.add_adapter: "a2bceb426d50",
    LRUCacheLoRAModelManager.activate_adapter: "5144cc9859b5",
    LRUCacheWorkerLoRAManager.add_adapter: "a4d030d5dd42",
    BaseLinearLayerWithLoRA.set_lora: "12c04c2a2cad",
    MergedColumnParallelLinearWithLoRA.set_lora: "2d0050dfaaf6",
    LoRALayerWeights.optimize: "d3c43d505706",
    PackedLoRALayerWeights.pack: "0c364733ff27",
}


@pytest.mark.parametrize("function", DIGESTS, ids=lambda function: function.__qualname__)
def test_vllm_code_is_unchanged(function: Callable[..., Any]) -> None:
    assert digest(function) == DIGESTS[function]


@pytest.mark.parametrize(
    ("owner", "attribute"),
    [
        (LLMEngine, "model_executor"),
        (UniProcExecutor, "driver_worker"),
        (WorkerBase, "model_runner"),
        (GPUModelRunner, "model"),
        (GPUModelRunner, "sampler"),
        (SecondModelRunner, "model"),
        (SecondModelRunner, "sampler"),
        (Sampler, "topk_topp_sampler"),
        (TopKTopPSampler, "logprobs_mode"),
        (LLMEngine, "engine_core"),
        (InprocClient, "engine_core"),
        (EngineCore, "scheduler"),
        (Scheduler, "kv_cache_manager"),
        (KVCacheManager, "block_pool"),
        (BlockPool, "cached_block_hash_to_block"),
        (LoRAModelRunnerMixin, "lora_manager"),
        (WorkerLoRAManager, "_adapter_manager"),
        (LoRAModelManager, "modules"),
        (LoRAModelManager, "lora_index_to_id"),
        (BaseLinearLayerWithLoRA, "base_layer"),
        (BaseLinearLayerWithLoRA, "lora_a_stacked"),
        (BaseLinearLayerWithLoRA, "lora_b_stacked"),
        (BaseLinearLayerWithLoRA, "output_slices"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_path_to_the_part_exists(owner: type, attribute: str) -> None:
    assert f"self.{attribute} = " in inspect.getsource(owner) or f"self.{attribute}: " in inspect.getsource(owner)


def test_external_launcher_runs_in_this_process() -> None:
    assert issubclass(ExecutorWithExternalLauncher, UniProcExecutor)


def test_repackable_layers_keep_linear_weights_and_restore_vllm() -> None:
    default = utils.dispatch_cpu_unquantized_gemm
    linear = torch.nn.Linear(400, 300)  # large enough to be packed
    weight = linear.weight.detach().clone()
    with repackable_layers() as layers:
        utils.dispatch_cpu_unquantized_gemm(linear, remove_weight=True)
    assert utils.dispatch_cpu_unquantized_gemm is default
    assert layers == [linear] and torch.equal(linear.weight, weight)


def test_repackable_layers_missing_layer_is_left_to_vllm() -> None:
    missing = torch.nn.Linear(4, 3, device="meta")
    with repackable_layers() as layers:
        utils.dispatch_cpu_unquantized_gemm(missing, remove_weight=True)
    assert layers == [] and missing.cpu_linear is torch.nn.functional.linear


def test_pack_linear_weight_keeps_the_weight_and_multiplies_with_it() -> None:
    linear = torch.nn.Linear(400, 300)
    x = torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    pack_linear_weight(linear)
    assert linear.weight.shape == (300, 400)
    torch.testing.assert_close(linear.cpu_linear(x, linear.weight, linear.bias), linear(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_layer_gets_new_weights_and_bias_after_it_was_used(dtype: torch.dtype) -> None:
    # Small enough for vLLM's product of CPUs with AMX, where this machine has one.
    linear = torch.nn.Linear(64, 32, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    for _ in range(2):
        with torch.inference_mode():  # in which an engine packs a layer on its first use
            pack_linear_weight(linear)
            product = linear.cpu_linear(x, linear.weight, linear.bias)
        torch.testing.assert_close(product, linear(x), rtol=0.01, atol=0.01)
        with torch.no_grad():  # as in a weight sync
            for parameter in (linear.weight, linear.bias):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        assert {parameter.dtype for parameter in linear.parameters()} == {dtype}


def test_pack_linear_weight_keeps_a_bias_that_vllm_replaces() -> None:
    # What vLLM does with a small layer in 16 bits on a CPU with AMX, for machines without it.
    def pack(layer: Any, pack_by_default: Callable[[], None]) -> None:
        layer.bias.data = layer.bias.to(torch.float32)
        layer.cpu_linear = lambda x, weight, bias: (bias, bias is not None and bias.dtype)

    linear = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    bias = linear.bias
    before = bias.detach().clone()
    with torch.inference_mode(), replaced_linear_packing(pack):
        pack_linear_weight(linear)
    assert linear.bias is bias and torch.equal(bias, before) and bias.dtype == torch.bfloat16
    read, dtype = linear.cpu_linear(None, linear.weight, linear.bias)
    assert dtype == torch.float32 and torch.equal(read, before.float())
    assert linear.cpu_linear(None, linear.weight, None) == (None, False)  # a rank that does not add the bias


def test_named_shared_memory_adds_the_token_and_restores_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_DIST_IDENT", "/ident")
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    default = _CPUSHMDistributed.make_group_name(communicator)
    with named_shared_memory("abc"):
        assert _CPUSHMDistributed.make_group_name(communicator) == f"abc{default.replace('/', '')}"
    assert _CPUSHMDistributed.make_group_name(communicator) == default


def test_unlink_shared_memory_deletes_names_with_the_token() -> None:
    token, other = secrets.token_hex(8), secrets.token_hex(8)
    own = [SHARED_MEMORY_FOLDER / name for name in (f"{token}-tp:0", f"sem.{token}-tp:0")]
    left = SHARED_MEMORY_FOLDER / f"{other}-tp:0"
    for file in (*own, left):
        file.touch()
    unlink_shared_memory(token)
    assert not any(file.exists() for file in own) and left.exists()
    unlink_shared_memory(other)
    assert not left.exists()


class Wrapped(BaseLayerWithLoRA):
    """A layer with LoRA, as vLLM puts it in the place of a layer."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_base_layers_have_the_names_without_lora_and_go_back() -> None:
    inner = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    plain = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"q": Wrapped(inner[0]), "k": plain})})
    model["head"] = Wrapped(inner[1])
    wrapped = [name for name, _ in model.named_parameters()]
    assert wrapped == ["layer.q.base_layer.weight", "layer.k.weight", "head.base_layer.weight"]
    with pytest.raises(RuntimeError, match="while loading"), base_layers(model):
        found = dict(model.named_parameters())
        assert list(found) == ["layer.q.weight", "layer.k.weight", "head.weight"]
        assert found["layer.q.weight"] is inner[0].weight and found["head.weight"] is inner[1].weight
        raise RuntimeError("while loading")
    assert [name for name, _ in model.named_parameters()] == wrapped


def test_slot_rank_is_the_next_that_vllm_allows() -> None:
    assert get_args(MaxLoRARanks) == REQUEST_RANKS
    assert [slot_rank(rank, REQUEST_RANKS) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]


def engine_with(runner: object) -> Any:
    worker = SimpleNamespace(model_runner=runner)
    executor = SimpleNamespace(driver_worker=worker)
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


def second_runner() -> SecondModelRunner:
    """Return a runner of the real class without a device, which none of its methods is called on."""
    return object.__new__(SecondModelRunner)


@pytest.mark.parametrize("stored", [None, "main"], ids=["first use", "stored before"])
def test_bound_stream_replaces_the_stored_stream_and_restores_it(stored: str | None) -> None:
    runner = second_runner()
    if stored:
        vars(runner)["main_stream"] = stored
    with pytest.raises(RuntimeError, match="in generation"), bound_stream(runner, "ahead"):
        assert runner.main_stream == "ahead"
        raise RuntimeError("in generation")
    assert vars(runner).get("main_stream") == stored


def test_bound_stream_is_the_one_that_outputs_are_copied_after() -> None:
    source = inspect.getsource(SecondModelRunner)
    assert source.count("main_stream=self.main_stream") == 2  # generation, and pooling
    assert "self.main_stream = " not in source  # a cached property: the stored value can be replaced


def test_bound_to_current_stream_leaves_the_first_runner_alone() -> None:
    runner = object.__new__(GPUModelRunner)
    with bound_to_current_stream(engine_with(runner)):
        assert vars(runner) == {}


def test_runner_number_tells_the_runners_apart() -> None:
    assert runner_number(engine_with(second_runner())) == 2
    assert runner_number(engine_with(object.__new__(GPUModelRunner))) == 1
    assert runner_number(engine_with(object.__new__(CPUModelRunner))) == 1


def test_prefer_second_runner_widens_only_an_existing_list(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
    assert not hasattr(settings, name)  # the installed release uses the second runner for every model
    prefer_second_runner()
    assert not hasattr(settings, name)
    # What another supported release of vLLM has; no run can have both.
    monkeypatch.setattr(settings, name, frozenset({"Qwen3ForCausalLM"}), raising=False)
    prefer_second_runner()
    assert getattr(settings, name) == {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"}


REGISTERING = """
from grpo_ray.inference.vllm_internals import register_kernels_before_forks
register_kernels_before_forks()
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler
before = rejection_sampler.rejection_greedy_sample_kernel
current_platform.register_triton_kernel_overrides()  # as each engine does
assert rejection_sampler.rejection_greedy_sample_kernel is before
print(type(before) is KernelOverride)
"""


@pytest.mark.slow
@pytest.mark.skipif(not current_platform.is_cpu(), reason="only the CPU replaces Triton's kernels")
def test_kernels_are_registered_once() -> None:
    done = subprocess.run([sys.executable, "-c", REGISTERING], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True"
    assert "already registered" not in done.stdout + done.stderr
