"""Access to private parts of vLLM, gathered here because any vLLM release may change them.

| private part of vLLM                              | reason for using it                                             |
|---------------------------------------------------|-----------------------------------------------------------------|
| path from `LLM` to its model runner               | the weights are loaded into the runner's model, and the sampler |
|                                                   | belongs to the runner; so does the manager of LoRA adapters     |
|                                                   | (see `lora_requests.py` for its own private parts)              |
| `dispatch_cpu_unquantized_gemm`, `cpu_linear`     | the CPU backend discards the weights that it has packed, so     |
|                                                   | they could not be synced (see `cpu_packing.py`)                 |
| `TopKTopPSampler.forward`, `apply_top_k_top_p`    | the CPU's sampling is replaced (see `cpu_sampler.py`)           |
| `Sampler.forward`, columns of `LogprobsTensors`   | log-probabilities before filters and penalties are returned     |
|                                                   | beside those after them (see `unprocessed_logprobs.py`)         |
| path from `LLM` to its `StructuredOutputManager`, | the learner excludes the tokens that the engine has excluded    |
| `grammar_init`, `_create_grammar`                 | (`rollout.structured_outputs`)                                  |
| `_CPUSHMDistributed.make_group_name`              | shared memory of different runs must have different names       |
| `GPUModelRunner.main_stream` (second runner)      | generating ahead runs on a CUDA stream of its own               |
| `DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`           | older releases use the second runner for one architecture only  |
| `initialize_layerwise_reload`, `finalize_...`     | a quantized engine quantizes the weights of each sync           |
| path from `LLM` to its `BlockPool`                | the prefix cache is proven to be empty after a sync             |
| `CpuPlatform.register_triton_kernel_overrides`    | workers forked from a process that has registered the kernels   |
|                                                   | do not search all modules for them again                        |

`tests/integration/inference/test_vllm_internals.py` fails when a release changes the code behind one of them. vLLM is
imported inside the functions, so that modules which import this one stay light.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ray.errors import ConfigError, SyncError

if TYPE_CHECKING:
    import torch
    from vllm import LLM
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

SHARED_MEMORY_FOLDER = Path("/dev/shm")


def register_kernels_before_forks() -> None:
    """Register the CPU's kernels in place of Triton's, for the engines of all processes forked from this one.

    vLLM does it whenever an engine starts: it searches the attributes of all imported modules, which takes half a
    second. Modules that are imported later find the registered kernels.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        platform = type(current_platform)
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def engine_model(llm: "LLM") -> "torch.nn.Module":
    """Return the engine's model, whose `load_weights` takes the learner's weights."""
    return _model_runner(llm).model


def logits_sampler(llm: "LLM") -> "Sampler":
    """Return the part of the engine that processes logits and draws tokens from them.

    Raises:
        ConfigError: the engine has another kind of sampler, of vLLM's second model runner.
    """
    from vllm.v1.sample.sampler import Sampler

    sampler = _model_runner(llm).sampler
    if not isinstance(sampler, Sampler):
        raise ConfigError(
            "vLLM runs this model with its second model runner, whose sampler cannot return the log-probabilities that "
            "prove the weight sync with grpo.top_p and other filters and penalties; remove these options"
        )
    return sampler


def token_sampler(llm: "LLM") -> "TopKTopPSampler":
    """Return the part of the engine that draws tokens from logits."""
    return _model_runner(llm).sampler.topk_topp_sampler


def lora_manager(llm: "LLM") -> Any:
    """Return the part of the engine that holds its LoRA adapters (see `lora_requests.py`)."""
    return _model_runner(llm).lora_manager


def _model_runner(llm: "LLM") -> Any:
    # With the executor "external_launcher" the engine's only worker is in this process.
    return llm.llm_engine.model_executor.driver_worker.model_runner


def cached_blocks(llm: "LLM") -> int:
    """Return the number of blocks in the prefix cache, whose keys and values a later prompt would reuse."""
    # With the executor "external_launcher" the scheduler is in this process too.
    client: Any = llm.llm_engine.engine_core  # InprocClient
    return len(client.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


class FormMasks:
    """Tokens that the form of a run's completions allows (`rollout.structured_outputs`), computed by the engine."""

    def __init__(self, llm: "LLM") -> None:
        # With the executor "external_launcher" the scheduler is in this process, and compiles a form when a request is
        # added.
        client: Any = llm.llm_engine.engine_core  # InprocClient
        self._manager = client.engine_core.structured_output_manager
        self._request: Any = None
        begin = self._manager.grammar_init

        def keep_and_begin(request: Any) -> None:
            if request.structured_output_request is not None:
                self._request = request  # all have the form of the run, and its end tokens
            begin(request)

        self._manager.grammar_init = keep_and_begin

    def reader(self, completions: Sequence[Sequence[int]]) -> "MaskReader":
        """Return a reader of the masks under which the engine has sampled the tokens of completions.

        Args:
            completions: token ids of completions of this run. The engine has had a request with the form.
        """
        return MaskReader(self._manager.backend, lambda: self._manager._create_grammar(self._request), completions)


class MaskReader:
    """Reader of the masks of completion tokens, a part at a time, as they are large: a bit for each token id."""

    def __init__(self, backend: Any, begin: Callable[[], Any], completions: Sequence[Sequence[int]]) -> None:
        """
        Args:
            backend: vLLM's `StructuredOutputBackend`.
            begin: returns the form before the first token, vLLM's `StructuredOutputGrammar`.
            completions: token ids of each completion.
        """
        self._backend = backend
        self._begin = begin
        self._tokens = ((place, token) for ids in completions for place, token in enumerate(ids))
        self.left = sum(map(len, completions))
        """Number of tokens that have not been read."""

    def take(self, count: int) -> "torch.Tensor":
        """Return the masks of the next tokens, on the CPU.

        Returns:
            (count, ceil(V / 32)) int32: bit v % 32 of word v // 32 is 1 if token v is allowed.

        Raises:
            SyncError: the form excludes a token.
        """
        masks: torch.Tensor = self._backend.allocate_token_bitmask(count)
        for row, (place, token) in enumerate(itertools.islice(self._tokens, count)):
            if place == 0:
                self._form = self._begin()
            if self._form.is_terminated():
                masks[row] = -1  # all tokens
                continue
            self._form.fill_bitmask(masks, row)
            if not self._form.accept_tokens("", [token]):
                raise SyncError(f"the engine has sampled token {token}, which rollout.structured_outputs excludes")
        self.left -= count
        return masks


SECOND_RUNNER_ARCHITECTURES = frozenset({"Qwen2ForCausalLM", "LlamaForCausalLM"})
"""Dense architectures that get vLLM's second model runner on GPUs, besides those for which it is vLLM's default."""


def prefer_second_runner() -> None:
    """Let vLLM use its second model runner for `SECOND_RUNNER_ARCHITECTURES` too, if the release has such a list.

    With a seed per request the first runner draws random numbers request by request, in Python; the second draws those
    of all requests in one kernel, from seed and position. vLLM 0.22 has such a list with Qwen3 only; newer releases
    use the second runner for every model. In both, vLLM falls back to the first runner, with a warning, for features
    that the second does not support. The environment variable VLLM_USE_V2_MODEL_RUNNER has precedence; if it is 1, vLLM
    refuses a model with such features. Works for an engine in this process only: worker processes have vLLM's own list.
    """
    from vllm.config import vllm as settings

    default = getattr(settings, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", None)
    if default is not None:
        settings.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = default | SECOND_RUNNER_ARCHITECTURES


def runner_number(llm: "LLM") -> int:
    """Return 2 if the engine has vLLM's second model runner, 1 otherwise."""
    return 2 if type(_model_runner(llm)).__module__.startswith("vllm.v1.worker.gpu.") else 1


@contextmanager
def bound_to_current_stream(llm: "LLM") -> Iterator[None]:
    """Let the engine generate on the calling thread's own CUDA stream.

    vLLM's second model runner stores the stream of the thread that first generates. It copies sampled tokens to the
    host after the work of that stream, and switches the generating thread to it. If another thread generated later, the
    runner would copy tokens before they exist.
    """
    runner = _model_runner(llm)
    if not hasattr(type(runner), "main_stream"):  # the first runner looks up the stream in every step
        yield
        return
    import torch

    with bound_stream(runner, torch.cuda.current_stream(runner.device)):
        yield


@contextmanager
def bound_stream(runner: Any, stream: Any) -> Iterator[None]:
    """Replace the main stream of vLLM's second model runner, a cached property, and restore it."""
    stored = vars(runner).get("main_stream")
    runner.main_stream = stream
    try:
        yield
    finally:
        del runner.main_stream
        if stored is not None:
            runner.main_stream = stored


def load_weights(llm: "LLM", weights: Iterable[tuple[str, "torch.Tensor"]]) -> tuple[set[str], set[str]]:
    """Copy weights into the engine's model; an engine that quantizes them does so again, layer by layer.

    Args:
        weights: under the names of a checkpoint.

    Returns:
        The engine's names of the parameters that were set, and of those that must be.
    """
    model = engine_model(llm)
    expected = {name for name, _ in model.named_parameters()}
    if llm.llm_engine.model_config.quantization is None:
        return model.load_weights(weights) or set(), expected
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def keep_weight(layer: "torch.nn.Module", pack_by_default: Callable[[], None]) -> None:
        # An unquantized linear layer is not packed here: packing discards the loaded weight, and vLLM would then copy
        # the discarded one over the kept one. The caller packs the layer afterwards.
        if not is_linear(layer):
            pack_by_default()

    initialize_layerwise_reload(model)
    # Now the parameters are those of a checkpoint, without scales, and a tied weight is listed under both of its names.
    expected &= {name for name, _ in model.named_parameters()}
    with replaced_linear_packing(keep_weight):
        loaded = model.load_weights(weights) or set()
        finalize_layerwise_reload(model, llm.llm_engine.model_config)
    return loaded, expected


def filter_top_k_top_p(logits: "torch.Tensor", k: "torch.Tensor | None", p: "torch.Tensor | None") -> "torch.Tensor":
    """Set the logits that top-k and top-p exclude to -inf, with vLLM's own filter.

    Args:
        logits: (B, V) float32; may be overwritten.
        k, p: (B,) each, overwritten; None if no request has such a filter.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits, k, p)


def is_linear(layer: Any) -> bool:
    """Return True if the weight of a layer that vLLM's CPU backend would pack is that of a linear layer."""
    return not layer.weight.is_meta and layer.weight.ndim == 2


def pack_linear_weight(layer: "torch.nn.Module") -> None:
    """Pack the layer's present weight as vLLM does and set `layer.cpu_linear`; weight and bias themselves are kept.

    On a CPU with AMX, vLLM's product of a small layer in 16 bits reads the bias in float32, and the layer's own bias
    would be replaced by a copy in float32 that no later weight sync can write to. So vLLM gets a copy to replace.
    """
    from torch import nn
    from vllm.model_executor.layers import utils

    own: nn.Parameter | None = getattr(layer, "bias", None)
    if own is None:
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return
    layer.bias = nn.Parameter(own.detach().clone(), requires_grad=False)
    try:
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        read = layer.bias.detach()
    finally:
        layer.bias = own
    if read.dtype != own.dtype:
        product: Any = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: product(x, weight, None if bias is None else read)


@contextmanager
def replaced_linear_packing(
    replacement: Callable[["torch.nn.Module", Callable[[], None]], None],
) -> Iterator[None]:
    """Replace the function with which vLLM's CPU backend packs the weight of a layer after loading it.

    Args:
        replacement: called with each layer and a function that packs the layer as vLLM does by default.
    """
    from vllm.model_executor.layers import utils

    default = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: "torch.nn.Module", remove_weight: bool) -> None:
        replacement(layer, lambda: default(layer, remove_weight))

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = default


@contextmanager
def named_shared_memory(token: str) -> Iterator[None]:
    """Add a token to the name of the shared memory of CPU workers that share an engine.

    vLLM derives the name from the workers' ranks alone, and fails if the name exists. Without the token, the shared
    memory of a killed worker or of another run would keep every later engine on the machine from starting.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    default = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: f"{token}{default(group).replace('/', '')}")
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(default)


def unlink_shared_memory(token: str) -> None:
    """Delete the names of shared memory that contain a token.

    Workers that have already joined keep using it, and nothing is left on the machine when all of them have ended.
    """
    for file in SHARED_MEMORY_FOLDER.glob(f"*{token}*"):
        file.unlink(missing_ok=True)
