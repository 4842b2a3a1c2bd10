"""Tests of the private parts of vLLM that the package uses: unchanged code, and replacement and restoration."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_digest import digest
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p, random_sample
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from grpo_ray.inference import vllm_internals
from grpo_ray.inference.cpu_packing import repackable_layers
from grpo_ray.inference.vllm_internals import named_shared_memory, pack_linear_weight, unlink_shared_memory

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
        (Sampler, "topk_topp_sampler"),
        (TopKTopPSampler, "logprobs_mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_path_to_the_sampler_exists(owner: type, attribute: str) -> None:
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


def test_named_shared_memory_adds_the_token_and_restores_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_DIST_IDENT", "/ident")
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    default = _CPUSHMDistributed.make_group_name(communicator)
    with named_shared_memory("abc"):
        assert _CPUSHMDistributed.make_group_name(communicator) == f"abc{default.replace('/', '')}"
    assert _CPUSHMDistributed.make_group_name(communicator) == default


def test_unlink_shared_memory_deletes_names_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_internals, "SHARED_MEMORY_FOLDER", tmp_path)
    for name in ("abc-tp:0", "sem.abc-tp:0", "other-tp:0"):
        (tmp_path / name).touch()
    unlink_shared_memory("abc")
    assert [path.name for path in tmp_path.iterdir()] == ["other-tp:0"]
