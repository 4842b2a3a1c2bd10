"""Uses of libraries that reading our source does not show, each checked against the sources of one release.

`tests/unit/test_library_contract.py` asserts that the tables have no stale row, that each attribute of an untyped
object in the modules for libraries' private parts has a row in `PATHS`, and that `INHERITED` is complete.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from library_contract.source_tree import (
    UNKNOWN,
    Class,
    Function,
    FunctionNode,
    Module,
    SourceTree,
    parse,
)
from library_contract.uses import Check, similar

V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
LINEAR_LAYERS = "vllm.model_executor.layers.utils"
TRL_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
TRL_ENGINE = "trl.generation.vllm_generation:VLLMGeneration"
RAY_POLICY = "ray.train.v2._internal.execution.scaling_policy:ElasticScalingPolicy"

PATHS: dict[str, tuple[str, ...]] = {
    "grpo_ray/inference/vllm_internals.py": (
        "vllm.platforms.interface:Platform.is_cpu()",
        "vllm.platforms.interface:Platform.register_triton_kernel_overrides()",
        # From an engine to its model, in the process of the worker
        "vllm.v1.engine.llm_engine:LLMEngine.model_executor",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.driver_worker",
        "vllm.v1.worker.worker_base:WorkerBase.model_runner",
        "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.lora_manager",
        f"{V1_RUNNER}.model",
        f"{V2_RUNNER}.model",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.model",
        "vllm.model_executor.models.qwen2:Qwen2ForCausalLM.load_weights(weights)",
        "vllm.model_executor.model_loader.reload:initialize_layerwise_reload(model)",
        "vllm.model_executor.model_loader.reload:finalize_layerwise_reload(model, model_config)",
        # From an engine to its prefix cache
        "vllm.v1.engine.llm_engine:LLMEngine.engine_core",
        "vllm.v1.engine.core_client:InprocClient.engine_core",
        "vllm.v1.engine.core:EngineCore.scheduler",
        "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool",
        "vllm.v1.core.block_pool:BlockPool.cached_block_hash_to_block",
        # From an engine to the masks of structured outputs
        "vllm.v1.engine.core:EngineCore.structured_output_manager",
        "vllm.v1.structured_output:StructuredOutputManager.backend",
        "vllm.v1.structured_output:StructuredOutputManager.grammar_init(request)",
        "vllm.v1.structured_output:StructuredOutputManager._create_grammar(request)",
        "vllm.v1.request:Request.structured_output_request",
        "vllm.v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask(max_num_seqs)",
        "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens(request_id, tokens)",
        "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.fill_bitmask(bitmask, idx)",
        "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.is_terminated()",
        f"{V2_RUNNER}.main_stream",
        f"{V2_RUNNER}.device",
        # Samplers: the first model runner's only
        f"{V1_RUNNER}.sampler",
        f"{V2_RUNNER}.sampler",
        "vllm.v1.sample.sampler:Sampler.topk_topp_sampler",
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p(logits, k, p)",
        # The CPU backend
        f"{LINEAR_LAYERS}:dispatch_cpu_unquantized_gemm(layer, remove_weight=)",
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name(communicator)",
    ),
    "grpo_ray/inference/lora_requests.py": (
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._adapter_manager",
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.remove_all_adapters()",
        "vllm.lora.model_manager:LRUCacheLoRAModelManager.add_adapter(lora)",
        "vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter(lora_id)",
        "vllm.lora.model_manager:LRUCacheLoRAModelManager.modules",
        "vllm.lora.model_manager:LRUCacheLoRAModelManager.lora_index_to_id",
        "vllm.lora.lora_weights:LoRALayerWeights.rank",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.base_layer",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.lora_a_stacked",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.lora_b_stacked",
        "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.output_slices",
    ),
    "grpo_ray/inference/local_engine.py": (
        "vllm.outputs:RequestOutput.request_id",
        "vllm.outputs:RequestOutput.outputs",
        "vllm.outputs:CompletionOutput.token_ids",
    ),
    "grpo_ray/inference/engine.py": ("transformers.modeling_utils:PreTrainedModel.name_or_path",),
    "grpo_ray/inference/sampling.py": (
        "vllm.outputs:CompletionOutput.logprobs",
        "vllm.outputs:CompletionOutput.finish_reason",
        "vllm.logprobs:FlatLogprobs.logprobs",
        "vllm.logprobs:FlatLogprobs.start_indices",
        "vllm.logprobs:FlatLogprobs.end_indices",
    ),
    "grpo_ray/inference/arguments.py": (
        "vllm.platforms.interface:Platform.is_cpu()",
        "transformers.configuration_utils:PreTrainedConfig.get_text_config()",
    ),
    "grpo_ray/inference/cpu_sampler.py": (
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.logprobs_mode",
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward",
    ),
    "grpo_ray/inference/unprocessed_logprobs.py": (
        "vllm.v1.sample.sampler:Sampler.forward(logits, sampling_metadata)",
        "vllm.v1.sample.metadata:SamplingMetadata.max_num_logprobs",
        "vllm.v1.sample.metadata:SamplingMetadata.temperature",
        "vllm.v1.outputs:SamplerOutput.logprobs_tensors",
        "vllm.v1.outputs:LogprobsTensors.logprob_token_ids",
        "vllm.v1.outputs:LogprobsTensors.logprobs",
    ),
    "grpo_ray/learner/trl_internals.py": (
        "trl.trainer.utils:_use_triton(device)",
        "trl.trainer.utils:_ChunkedLogProbFunction",
        "transformers.configuration_utils:PreTrainedConfig._attn_implementation",
        "transformers.configuration_utils:PreTrainedConfig.get_text_config()",
        "transformers.modeling_utils:PreTrainedModel._is_stateful",
        "transformers.modeling_utils:PreTrainedModel._supports_attention_backend",
        "transformers.modeling_utils:PreTrainedModel._supports_flash_attn",
        "accelerate.state:AcceleratorState.fsdp_plugin",
        "accelerate.state:AcceleratorState.distributed_type",
        f"{TRL_TRAINER}._entropy_bonus_enabled",
        f"{TRL_TRAINER}._last_world_entropy",
        f"{TRL_TRAINER}._metrics",
        f"{TRL_TRAINER}._step",
    ),
    "grpo_ray/resilience/ray_internals.py": ("ray._private.node:Node.dead_processes()",),
    "grpo_ray/resilience/ray_train_internals.py": (
        "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator:"
        "_AutoscalingCoordinatorActor.get_reserved_resources(requester_id, recompute=)",
        f"{RAY_POLICY}._autoscaling_coordinator",
        f"{RAY_POLICY}._requester_id",
        "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._initialize_and_run_controller(scaling_policy=)",
    ),
    "grpo_ray/resilience/elastic.py": (
        "ray.train.v2._internal.execution.worker_group:WorkerStatus.training_report",
        "ray.train.v2._internal.execution.scaling_policy:ResizeDecision.num_workers",
    ),
}
"""File of ours -> what it uses through objects without a known type: `module:Class.attribute`, or with the arguments
that we pass: `module:function(positional, keyword=)`."""

INHERITED: dict[str, tuple[str, ...]] = {
    "grpo_ray.data.split:StepDataConfig": ("__init__", "configure"),
    "grpo_ray.resilience.controller_callback:CoordinatorCallback": ("after_exception", "after_report"),
    "grpo_ray.inference.dedicated_engine:DedicatedEngine": ("_init_vllm", "sync_weights"),
    "grpo_ray.inference.engine:Engine": ("_init_vllm", "_llm_weights_sleeping", "sync_weights"),
    "grpo_ray.inference.learner_end:LearnerEnd": ("__init__", "_iter_named_params"),
    "grpo_ray.learner.learner:Learner": (
        "__init__",
        "_clip_grad_norm",
        "_compute_loss",
        "_get_per_token_logps_and_entropies",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_prepare_inputs",
        "_save",
        "_save_checkpoint",
        "_save_optimizer_and_scheduler",
        "create_accelerator_and_postprocess",
        "create_model_card",
        "create_optimizer",
        "get_high_entropy_mask",
        "get_train_dataloader",
        "is_fsdp_enabled",
        "optimizer",
        "save_model",
        "training_step",
        "use_vllm",
    ),
    "grpo_ray.learner.resume:ResumedSettings": ("on_train_begin",),
    "grpo_ray.learner.sft:SftLearner": (
        "__init__",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_save",
        "_save_checkpoint",
        "create_model_card",
        "get_train_dataloader",
        "training_step",
    ),
    "grpo_ray.resilience.elastic:DivisibleScalingPolicy": (
        "__init__",
        "after_controller_state_update",
        "make_decision_for_non_running_worker_group",
        "make_decision_for_running_worker_group",
        "on_controller_start_worker_group",
    ),
    "grpo_ray.resilience.elastic:PreemptedError": ("__init__",),
    "grpo_ray.resilience.elastic:PreemptibleTrainer": ("__init__",),
    "grpo_ray.resilience.nonfinite:NonFiniteMonitor": ("on_pre_optimizer_step", "on_train_begin", "state"),
    "grpo_ray.resilience.ray_train_internals:ControlledTrainer": (
        "_initialize_and_run_controller",
        "_register_sigint_handler",
    ),
    "grpo_ray.resilience.ray_train_internals:ElasticPolicy": (
        "_count_possible_workers",
        "_get_reserved_resources",
        "_latest_monitor_time",
    ),
    "grpo_ray.training.memory_use:MemoryCallback": ("on_save", "on_step_end", "on_train_begin", "on_train_end"),
    "grpo_ray.training.report_callback:BaselineCallback": ("on_train_begin",),
    "grpo_ray.training.report_callback:FirstStepCallback": ("on_step_end",),
    "grpo_ray.training.report_callback:OptimizerTimer": ("on_optimizer_step", "on_pre_optimizer_step"),
    "grpo_ray.training.report_callback:ReportCallback": (
        "on_log",
        "on_save",
        "on_step_end",
        "on_train_begin",
        "on_train_end",
    ),
    "grpo_ray.training.report_callback:WatchdogCallback": (
        "on_step_begin",
        "on_step_end",
        "on_train_begin",
        "on_train_end",
    ),
}
"""Class of ours -> what it overrides or sets of a library's class. If the library renamed one of them, ours would
silently be something of its own."""


@dataclass(frozen=True)
class Keywords:
    """Keywords that we pass as a dictionary."""

    file: str
    place: str
    """Function, method, class or variable that has the names."""
    variables: tuple[str, ...]
    """Variables of the function which hold the dictionary. "return": what it returns."""
    callee: str
    """Class or function that gets them."""


KEYWORDS = (
    Keywords("grpo_ray/inference/arguments.py", "llm_arguments", ("arguments",), "vllm.entrypoints.llm:LLM"),
    Keywords(
        "grpo_ray/inference/sampling.py", "training_sampling", ("return", "text"), "vllm.sampling_params:SamplingParams"
    ),
    Keywords(
        "grpo_ray/inference/learner_end.py",
        "LearnerEnd.__init__",
        ("self.training_sampling",),
        "vllm.sampling_params:SamplingParams",
    ),
    Keywords("grpo_ray/config/sampling.py", "SamplingOptions", (), "vllm.sampling_params:SamplingParams"),
    Keywords(
        "grpo_ray/learner/trl_config.py",
        "optional_arguments",
        ("arguments",),
        "trl.trainer.grpo_config:GRPOConfig",
    ),
    Keywords("grpo_ray/config/trl_fields.py", "PASSED", (), "trl.trainer.grpo_config:GRPOConfig"),
    Keywords("grpo_ray/config/trl_fields.py", "OURS", (), "trl.trainer.grpo_config:GRPOConfig"),
)

WORDS: dict[str, dict[str, str]] = {
    "grpo_ray/inference/arguments.py": {"processed_logprobs": "vllm.config.model"},
    "grpo_ray/inference/local_engine.py": {"external_launcher": "vllm.v1.executor.abstract"},
    "grpo_ray/inference/engine.py": {
        "weights": "vllm.v1.worker.gpu_worker",
        "kv_cache": "vllm.v1.worker.gpu_worker",
    },
    "grpo_ray/inference/cpu_packing.py": {"cpu_linear": LINEAR_LAYERS},
    "grpo_ray/inference/vllm_internals.py": {"cpu_linear": LINEAR_LAYERS},
    "grpo_ray/learner/sharding_settings.py": {
        "state_dict_type": "accelerate.utils.dataclasses",
        "SHARDED_STATE_DICT": "accelerate.utils.constants",
    },
    "grpo_ray/resilience/ray_internals.py": {
        "autoscaling_state": "ray.core.generated.autoscaler_pb2",
        "GetClusterStatusReply": "ray.core.generated.autoscaler_pb2",
        "GcsClient": "ray.autoscaler.v2.sdk",
        "get_cluster_status": "ray.autoscaler.v2.sdk",
        "get_placement_group_table": "ray._private.state",
        "placement_group_id": "ray._private.state",
        "_connect_and_get_accessor": "ray._private.state",
        "FromString": "ray._private.state",
        "REMOVED": "ray.core.generated.gcs_pb2",
        "RAY_NODE_ID_KEY": "ray.dag.compiled_dag_node",
        "gcs_server": "ray._private.ray_constants",
        "raylet": "ray._private.ray_constants",
    },
}
"""File of ours -> a value or name that it relies on -> module of the library which has or uses it too. For values that
we pass, and for what is compiled or made at run time, so that its definition cannot be read."""

OPTIONS = "ray._common.ray_option_utils"
"""Module with the options of `ray.remote(...)` and `.options(...)`."""

CALL_OPTIONS = "ray.actor:ActorMethod._remote"
"""Method whose parameters are the options of one call of an actor, `actor.method.options(...)`."""

ENVIRONMENT = {"VLLM": "vllm.envs", "TRL": "trl", "RAY": "ray"}
"""Prefix of environment variables -> module, or package, that reads them."""

NEWER_VARIABLES = frozenset({"VLLM_REGEX_COMPILATION_TIMEOUT_S"})
"""Variables that switch off what the oldest supported release does not have yet, so that nothing is lost without them;
tests/integration/config/test_vllm_fields.py looks for them in the installed one."""


def check_table(tree: SourceTree, root: Path, files: list[Path]) -> list[Check]:
    """Check all rows of the tables, and the environment variables and task options in our source.

    Args:
        tree: our source and that of the libraries.
        root: folder that our packages are in.
        files: our source.
    """
    checks = [check for file, paths in PATHS.items() for path in paths if (check := check_path(tree, root, file, path))]
    checks += [_check_inherited(tree, cls, name) for cls, names in INHERITED.items() for name in names]
    checks += [check for row in KEYWORDS for check in _check_keywords(tree, root, row)]
    checks += [
        check_word(tree, root, file, word, module) for file, words in WORDS.items() for word, module in words.items()
    ]
    for file in files:
        checks += _check_options(tree, root, file)
        checks += _check_environment(tree, root, file)
    return checks


def check_path(tree: SourceTree, root: Path, file: str, path: str) -> Check | None:
    """Check a row of `PATHS`. Returns None if the sources do not show whether it is right."""
    target, _, arguments = path.partition("(")
    name = target.rpartition(".")[2].rpartition(":")[2]
    line = line_of(root / file, name)
    found = tree.find(target)
    problem = None
    if found is UNKNOWN:
        return None
    if found is None:
        problem = f"is not there; {_alternatives(tree, target)}"
    elif arguments and isinstance(found, Function):
        passed = [each for each in arguments.rstrip(")").split(", ") if each]
        keywords = [each.rstrip("=") for each in passed if each.endswith("=")]
        signature = tree.signature(found, bound=found.owner is not None)
        problem = signature.problem(len(passed) - len(keywords), keywords)
    return Check(path.partition(".")[0], file, line, path, problem)


def _alternatives(tree: SourceTree, path: str) -> str:
    module_name, _, rest = path.partition(":")
    module = tree.module(module_name)
    if module is None:
        return f"there is no module {module_name}"
    *owner, name = rest.split(".")
    found = tree.find(f"{module_name}:{'.'.join(owner)}") if owner else module
    if isinstance(found, Class):
        classes = [each for each in tree.mro(found) if isinstance(each, Class)]
        return f"it has {similar([member for each in classes for member in (*each.members, *each.assigned)], name)}"
    if isinstance(found, Module):
        return f"the module has {similar(found.bindings, name)}"
    return f"there is no {'.'.join(owner)}"


def _check_inherited(tree: SourceTree, cls: str, name: str) -> Check:
    found = tree.find(cls)
    assert isinstance(found, Class), f"INHERITED has {cls}, which is not there; remove the row"
    own = tree.own_member(found, name)
    bases = [each for each in tree.mro(found)[1:] if isinstance(each, Class)]
    packages = [each.module.name.partition(".")[0] for each in bases]
    library = next(each for each in packages if each != found.module.name.partition(".")[0])
    is_there = tree.member_of(bases, name) is not None
    base = next(each for each, package in zip(bases, packages, strict=True) if package == library)
    members = [member for each in bases for member in (*each.members, *each.assigned)]
    problem = None if is_there else f"is not there to be overridden or set; it has {similar(members, name)}"
    file = f"{found.module.name.replace('.', '/')}.py"
    line = getattr(own.node, "lineno", 0) if own is not None and not isinstance(own, Module) else 0
    return Check(library, file, line, f"{base}.{name}", problem)


def _check_keywords(tree: SourceTree, root: Path, row: Keywords) -> Iterator[Check]:
    library = row.callee.partition(".")[0]
    callee = tree.find(row.callee)
    signature = tree.call_signature(callee) if isinstance(callee, Class | Function) else None
    for name, line in keywords_of(parse(root / row.file), row):
        problem = "is not there" if callee is None else None
        if signature is not None:
            problem = signature.problem(0, [name], complete=False)
        if signature is not None or problem:
            yield Check(library, row.file, line, f"{row.callee}({name}=)", problem)


def keywords_of(module: ast.Module, row: Keywords) -> list[tuple[str, int]]:
    """Return the keywords that a row of `KEYWORDS` stands for, each with its line."""
    owner, _, name = row.place.rpartition(".")
    body = module.body
    if owner:
        [cls] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = cls.body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [(ast.unparse(each.target), each.lineno) for each in node.body if isinstance(each, ast.AnnAssign)]
            return [(field, line) for field, line in fields if not field.startswith("_")]
        if isinstance(node, FunctionNode) and node.name == name:
            return [key for each in ast.walk(node) for key in _keys_assigned(each, row.variables)]
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            return dictionary_keys(node.value)
    raise AssertionError(f"KEYWORDS has {row.place}, which {row.file} does not define; update the row")


def _keys_assigned(node: ast.AST, variables: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the keys of dictionaries that a statement assigns to one of the variables, or merges into it."""
    if isinstance(node, ast.Return) and node.value is not None:
        return dictionary_keys(node.value) if "return" in variables else []
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
        return []
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if isinstance(target, ast.Subscript) and ast.unparse(target.value) in variables:
        is_key = isinstance(target.slice, ast.Constant)
        return [(str(target.slice.value), node.lineno)] if is_key else []  # type: ignore[attr-defined]
    return dictionary_keys(node.value) if ast.unparse(target) in variables else []


def dictionary_keys(node: ast.expr) -> list[tuple[str, int]]:
    """Return the literal keys of `{...}` and of `{...} | other`, each with its line."""
    if isinstance(node, ast.BinOp):
        return dictionary_keys(node.left) + dictionary_keys(node.right)
    if isinstance(node, ast.Call):  # dict(...), MappingProxyType({...})
        keywords = [(each.arg, each.value.lineno) for each in node.keywords if each.arg]
        return keywords + [key for each in node.args for key in dictionary_keys(each)]
    if not isinstance(node, ast.Dict):
        return []
    literals = [each for each in node.keys if isinstance(each, ast.Constant)]
    return [(each.value, each.lineno) for each in literals if isinstance(each.value, str)]


def check_word(tree: SourceTree, root: Path, file: str, word: str, module: str) -> Check:
    """Check an entry of `WORDS`."""
    found = tree.module(module)
    problem = None
    if not isinstance(found, Module):
        problem = f"cannot be looked up: there is no module {module}"
    elif not any(word in each for each in words_of(found.path)):
        problem = f"is not in {module}"
    return Check(module.partition(".")[0], file, line_of(root / file, word), word, problem)


def _check_options(tree: SourceTree, root: Path, file: Path) -> Iterator[Check]:
    module = tree.module(OPTIONS)
    known = words_of(module.path) if isinstance(module, Module) else frozenset()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call) and re.fullmatch(r"ray\.remote|.*\.options", ast.unparse(node.func)):
            is_call = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Attribute)
            for each in node.keywords:
                if is_call:
                    problem, use = _call_problem(tree, str(each.arg)), f"actor.method.options({each.arg}=)"
                else:
                    problem = None if each.arg in known else f"is no option in {OPTIONS}"
                    use = f"ray.remote({each.arg}=)"
                yield Check("ray", _relative(root, file), node.lineno, use, problem)


def _call_problem(tree: SourceTree, option: str) -> str | None:
    """Return the problem with an option of one call of an actor."""
    found = tree.find(CALL_OPTIONS)
    if not isinstance(found, Function):
        return f"cannot be checked: there is no {CALL_OPTIONS}"
    return tree.signature(found, bound=True).problem(0, [option])


def _check_environment(tree: SourceTree, root: Path, file: Path) -> Iterator[Check]:
    for node in ast.walk(parse(file)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        prefix = node.value.partition("_")[0]
        if prefix not in ENVIRONMENT or not re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", node.value):
            continue
        place = ENVIRONMENT[prefix]
        module = tree.module(place)
        is_package = isinstance(module, Module) and "." not in place
        files = sorted(module.path.parent.rglob("*.py")) if is_package else [module.path]  # type: ignore[union-attr]
        is_read = node.value in NEWER_VARIABLES or any(node.value in read(each) for each in files)
        yield Check(
            place.partition(".")[0],
            _relative(root, file),
            node.lineno,
            node.value,
            None if is_read else f"is no environment variable in {place}",
        )


def _relative(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


@functools.cache
def read(file: Path) -> str:
    """Read a file of a library once."""
    return file.read_text(encoding="utf-8")


@functools.cache
def words_of(file: Path) -> frozenset[str]:
    """Return the names and texts in a file; bytes as text."""
    found: set[object] = set()
    for node in ast.walk(parse(file)):
        found |= {getattr(node, kind, None) for kind in ("attr", "id", "name", "arg")}
        if isinstance(node, ast.Constant):
            found.add(node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value)
    return frozenset(each for each in found if isinstance(each, str))


def line_of(file: Path, name: str) -> int:
    """Return the first line of a file of ours that uses a name: as an attribute, a variable, a parameter or a text.

    Returns 0 if none does; the row of the table is then stale.
    """
    for node in ast.walk(parse(file)):
        named = (
            getattr(node, "attr", None),
            getattr(node, "id", None),
            getattr(node, "name", None),
            getattr(node, "arg", None),
            getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
        )
        if name in named and hasattr(node, "lineno"):
            return int(node.lineno)
        if isinstance(node, ast.ImportFrom | ast.Import) and name in [alias.name for alias in node.names]:
            return node.lineno
    return 0
