"""Adapters of PEFT: their configuration, and merging an adapter into the policy that it belongs to.

For weight sync and for exported folders alike, a layer is merged by PEFT's own `merge` on a float32 copy of its
weights, and rounded once. The weights being trained, and the frozen ones below them, are never modified: PEFT's way of
merging and unmerging them in place, which TRL takes at every sync, moves a frozen weight in 16 bits a little each time.

With `engine.adapter=request` nothing is merged for a sync: the engine gets the frozen weights and the updates.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from peft.optimizers.lorafa import LoraFAOptimizer
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch.distributed.tensor import DTensor

from grpo_ray.config.peft_fields import peft_arguments
from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError
from grpo_ray.models.quantized import QuantizedLinear, identities

TASK = "CAUSAL_LM"

READS_WEIGHTS = frozenset({"BOFT", "FROD", "UNILORA", "SHIRA"})
"""Types whose adapter cannot be built on torch's meta device."""
PLACES = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "bias")
"""Fields that choose what is trained, which LoRA has too."""
MERGE_READS_WEIGHTS = frozenset({"VBLORA", "HIRA", "WAVEFT", "PEANUT"})
"""Types that can be built there, but not merged."""


def peft_config(config: Config) -> PeftConfig | None:
    """Translate `model.lora` or `model.peft` for PEFT; None without an adapter.

    Call it right before the policy is loaded: it sets torch's seed to `run.seed`, so that every worker draws the same
    initial adapter weights (worker-count invariance).

    Raises:
        ConfigError: PEFT does not accept the settings.
    """
    if config.model.adapter is None:
        return None
    adapter = build_config(config.model.adapter)
    torch.manual_seed(config.run.seed)
    return adapter


def build_config(settings: Mapping[str, Any]) -> PeftConfig:
    """Build the config of an adapter from settings in the form of `model.peft`. Raises ConfigError."""
    kind = settings["type"]
    try:
        config: PeftConfig = PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type=TASK, **peft_arguments(settings))
    except Exception as error:  # settings reach regular expressions and divisions, each with errors of its own
        raise ConfigError(f"model.peft: PEFT does not accept the settings of {kind}: {_first_line(error)}") from None
    return config


def try_adapter(policy: Any, settings: Mapping[str, Any], *, requested: bool = False) -> int | None:
    """Give a policy on torch's meta device an adapter, merge it, and count the parameters that are trained.

    Args:
        requested: require an adapter that the engine applies as a LoRA request.

    Returns:
        The number of trained parameters; None for a type that reads the weights to build its adapter. Of such a type
        only the places of its layers are tried, with LoRA.

    Raises:
        ConfigError: PEFT cannot adapt the policy, the adapter cannot be merged, or it changes the output layer.
    """
    kind = settings["type"]
    adapter = build_config(settings)
    if kind in READS_WEIGHTS:
        adapter = build_config({"type": "LORA"} | {name: settings[name] for name in PLACES if name in settings})
    try:
        with torch.device("meta"):
            model = get_peft_model(policy, adapter)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        require_plain_output_layer(policy)
        if requested:
            require_plain_lora(model)
        if kind in READS_WEIGHTS:
            return None
        if kind == "TRAINABLE_TOKENS":
            require_embeddings(policy)
        if kind not in MERGE_READS_WEIGHTS:
            for module in policy.modules():
                if isinstance(module, BaseTunerLayer):
                    module.merge()
    except ConfigError:
        raise
    except Exception as error:  # settings reach regular expressions and divisions, each with errors of its own
        raise ConfigError(f"model.peft: PEFT cannot adapt the policy with {kind}: {_first_line(error)}") from None
    return trained


def require_embeddings(policy: Any) -> None:
    """Require that the adapted layers are embeddings, whose rows are those of tokens. Raises ConfigError."""
    for name, module in policy.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module.get_base_layer(), torch.nn.Embedding):
            raise ConfigError(
                f"model.peft.type=TRAINABLE_TOKENS trains rows of embeddings, and {name} is none; set "
                "model.peft.target_modules=[embed_tokens]"
            )


def require_plain_output_layer(policy: Any) -> None:
    """Require an output layer without adapter, from whose weight the loss is computed.

    Raises:
        ConfigError: it has an adapter, or is tied to an embedding that has one.
    """
    output, inputs = policy.get_output_embeddings(), policy.get_input_embeddings()
    if is_adapted(output) or (is_adapted(inputs) and policy.config.get_text_config().tie_word_embeddings):
        raise ConfigError(
            "model.peft: the output layer, or the embedding that it is tied to, cannot have an adapter, since the loss "
            "is computed from its weight alone; leave it out of target_modules, modules_to_save and "
            "trainable_token_indices"
        )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def base_model(model: torch.nn.Module) -> Any:
    """Return the policy that an adapter belongs to, or the model itself if it has none."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def train_in_float32(model: torch.nn.Module) -> None:
    """Convert the trained weights to float32, in which small steps are not rounded away.

    PEFT does so for most adapters, but not for biases, norms and whole modules that are trained in the policy's place.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def adapter_optimizer(
    model: PeftModel, config: Config, optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Build the optimizer of PEFT that `model.adapter_optimizer` names.

    Args:
        optimizer_class, arguments: the optimizer of `grpo.optim`, which LoRA+ uses; LoRA-FA takes its learning rate.
    """
    optimizer, adapter = config.model.adapter_optimizer, config.model.adapter
    assert optimizer is not None and adapter is not None  # `adapter_optimizer_fits`
    weight_decay = float(config.grpo.trl.get("weight_decay", 0.0))
    if optimizer.name == "loraplus":
        return create_loraplus_optimizer(
            model, optimizer_class, loraplus_lr_ratio=optimizer.ratio, loraplus_weight_decay=weight_decay, **arguments
        )
    lora = model.peft_config["default"]
    created = create_lorafa_optimizer(model, lora.r, lora.lora_alpha, lr=arguments["lr"], weight_decay=weight_decay)
    return SkippableLoraFA(created.param_groups)


class SkippableLoraFA(LoraFAOptimizer):
    """LoRA-FA for which a step without gradients changes nothing, as for torch's optimizers.

    `NonFiniteMonitor` skips a step by removing all gradients; PEFT's class multiplies the missing ones.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, and return the loss of `closure`, which computes the gradients; None without a closure."""
        loss = None if closure is None else closure()
        if any(each.grad is not None for group in self.param_groups for each in group["params"]):
            super().step()
        return loss


def merged_weights(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of each parameter of the policy with its adapter merged, without modifying the model.

    Names are those of the policy without an adapter. Collective: it gathers shards, so every rank must iterate.
    """
    for name, weight, _ in _merged_parameters(model.get_base_model()):
        yield name, weight.detach()


@dataclass(frozen=True)
class LoraUpdate:
    """Update of one layer with plain LoRA: the product of its two matrices."""

    layer: str
    """Name of the layer in the policy without the adapter."""
    first: torch.Tensor
    """(r, inputs), PEFT's lora_A."""
    second: torch.Tensor
    """(outputs, r), PEFT's lora_B times the layer's scale, in float32."""

    def to(self, device: str) -> "LoraUpdate":
        """Return the update on a device."""
        return LoraUpdate(self.layer, self.first.to(device), self.second.to(device))


def lora_updates(model: PeftModel) -> Iterator[LoraUpdate]:
    """Yield the update of each layer with plain LoRA. Collective: it gathers shards, so every rank must iterate."""
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLinear):
            (adapter,) = layer.active_adapters
            first, second = _unsharded(layer.lora_A[adapter].weight), _unsharded(layer.lora_B[adapter].weight)
            yield LoraUpdate(name, first.detach(), second.detach().float() * layer.scaling[adapter])


def frozen_weights(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of each weight of the policy that plain LoRA belongs to, without its updates; collective.

    Names are those of the policy without an adapter. A weight in four bits is dequantized.
    """
    for name, parameter, module in frozen_parameters(model):
        is_quantized = isinstance(module, QuantizedLinear) and parameter is module.codes
        yield name, module.dequantized() if is_quantized else _unsharded(parameter).detach()


def frozen_parameters(model: PeftModel) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
    """Yield the name of each weight of the policy that plain LoRA belongs to, the parameter that holds it, or its codes
    in four bits, and the parameter's module.
    """
    seen: set[int] = set()
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            module = module.get_base_layer()
        elif ".lora_" in name or name.endswith(".base_layer"):
            continue
        own = (
            identities(module) if isinstance(module, QuantizedLinear) else dict(module.named_parameters(recurse=False))
        )
        for attribute, parameter in own.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{attribute}".lstrip("."), parameter, module


def adapted_linear_layers(policy: torch.nn.Module) -> dict[str, int]:
    """Return the linear layers of a policy that have an adapter: name -> number of inputs and outputs."""
    layers = {}
    for name, module in policy.named_modules():
        if isinstance(module, BaseTunerLayer) and isinstance(layer := module.get_base_layer(), torch.nn.Linear):
            layers[name] = layer.in_features + layer.out_features
    return layers


def require_plain_lora(model: torch.nn.Module) -> dict[str, int]:
    """Require an adapter whose updates are the products of `lora_updates`, and return the rank of each layer, by name.

    Raises:
        ConfigError: the model has no adapter, or another one.
    """
    ranks = {}
    for name, module in base_model(model).named_modules():
        if not is_adapted(module):
            continue
        plain = isinstance(module, LoraLinear) and isinstance(module.get_base_layer(), torch.nn.Linear)
        if not plain or any(each in module.lora_variant or module.lora_bias[each] for each in module.active_adapters):
            raise ConfigError(
                f"engine.adapter=request: {name} has an adapter that vLLM does not apply in its forward pass, which "
                "takes LoRA on linear layers; leave the layer out, or set engine.adapter=merge, without "
                "model.quantization=int4 and model.share_base"
            )
        (adapter,) = module.active_adapters
        ranks[name] = int(module.r[adapter])
    if not ranks:
        raise ConfigError("engine.adapter=request: the policy has no LoRA adapter; set engine.adapter=merge")
    return ranks


Merged = tuple[str, torch.Tensor, torch.nn.Parameter]
"""Name of a parameter, the whole merged weight, and the parameter of the policy without the adapter."""


def _merged_parameters(policy: torch.nn.Module) -> Iterator[Merged]:
    """Yield each parameter of a policy once, whatever it is tied to."""
    seen: set[int] = set()
    adapted: str | None = None
    for name, module in policy.named_modules():
        if adapted is not None and name.startswith(adapted):
            continue  # the parts of an adapted layer are in its merged weights
        adapted = f"{name}." if is_adapted(module) else None
        for attribute, weight, parameter in _own_parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{attribute}".lstrip("."), weight, parameter


def _own_parameters(module: torch.nn.Module) -> Iterator[Merged]:
    """Yield the parameters of a module itself or, if it is adapted, those of the layer that it replaces."""
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    update = sharded_update(module)
    if update is not None:
        for name, parameter in module.get_base_layer().named_parameters():
            whole = _unsharded(parameter)
            yield name, whole.float() + _unsharded(update) if name == "weight" else whole, parameter
    elif isinstance(module, BaseTunerLayer):
        originals = identities(module.get_base_layer())
        with merged_layer(module) as layer:
            for name, weight in layer.named_parameters():
                yield name, weight, originals[name]
    elif isinstance(module, ModulesToSaveWrapper):
        originals = dict(module.original_module.named_parameters())
        for name, weight in saved_copy(module).named_parameters():
            yield name, _unsharded(weight), originals[name]
    elif isinstance(module, QuantizedLinear):
        for name, parameter in identities(module).items():
            yield name, getattr(module, name), parameter
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield name, _unsharded(parameter), parameter


def sharded_update(layer: Any) -> torch.Tensor | None:
    """Return the update of a sharded weight with plain LoRA, as a DTensor; None for every other layer.

    It is multiplied from shards, in another order than whole matrices would be, so the weights that are sent and those
    that the proof reads both take it from here.
    """
    if not isinstance(layer, LoraLinear) or not isinstance(layer.get_base_layer().weight, DTensor):
        return None
    (adapter,) = layer.active_adapters
    if adapter in layer.lora_variant or layer.lora_bias[adapter]:
        return None
    update: torch.Tensor = layer.get_delta_weight(adapter)
    return update


def is_adapted(module: torch.nn.Module) -> bool:
    """Return whether a module stands in the place of a layer of the policy that has an adapter."""
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def saved_copy(module: ModulesToSaveWrapper) -> torch.nn.Module:
    """Return the trained copy of a module in `modules_to_save`."""
    (name,) = module.active_adapters
    copy: torch.nn.Module = module.modules_to_save[name]
    return copy


@contextmanager
def merged_layer(layer: Any) -> Iterator[torch.nn.Module]:
    """Merge an adapted layer in float32, and yield the layer without adapter that has the merged weights.

    Afterwards the layer is as it was, since the merge works on copies. Collective: shards are gathered, so every rank
    must enter it.

    Args:
        layer: a `BaseTunerLayer` of PEFT, which is a module.
    """
    modules = [(module, _state_of(module)) for module in layer.modules()]
    base = layer.get_base_layer()
    try:
        with torch.no_grad():
            if isinstance(base, QuantizedLinear):
                base.expand(torch.float32)
            for module, _ in modules:
                for name, parameter in module._parameters.items():
                    if parameter is not None and (module is base or isinstance(parameter, DTensor)):
                        whole = _unsharded(parameter).detach()
                        copy = whole.to(torch.float32, copy=True) if module is base else whole
                        module._parameters[name] = torch.nn.Parameter(copy, requires_grad=False)
            layer.merge()
            yield layer.get_base_layer()
    finally:
        for module, state in modules:
            _restore(module, state)


def _state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with copies of its tables and lists, but not of its weights."""
    return {
        name: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
        for name, value in vars(module).items()
    }


def _restore(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module the attributes that `_state_of` returned; its tables and lists stay the same objects."""
    current = vars(module)
    for name in current.keys() - state.keys():
        del current[name]
    for name, value in state.items():
        if isinstance(value, dict):
            current[name].clear()
            current[name].update(value)
        elif isinstance(value, list):
            current[name][:] = value
        else:
            current[name] = value


def merge_adapter(model: PeftModel, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Merge the adapter into the policy's weights in place, remove the adapter, and return the policy.

    Args:
        dtype: precision of the merged policy; None keeps the policy's own.
    """
    for _, weight, parameter in _merged_parameters(model.get_base_model()):
        parameter.data = weight.detach().to(dtype or parameter.dtype)
    policy: torch.nn.Module = model.unload()
    return policy if dtype is None else policy.to(dtype)


def _unsharded(weight: torch.Tensor) -> torch.Tensor:
    """Return the full weight; gathers it where each worker holds a shard."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
