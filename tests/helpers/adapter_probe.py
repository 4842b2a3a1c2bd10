"""A real engine that receives adapters of many types in turn, for `test_adapters.py`."""

import copy
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lone_process import lone_process_group

STEPS, SYNCS = 3, 100


@dataclass
class Observation:
    """Result of an adapter in the engine."""

    gaps: list[float]
    """Mean difference of the log-probabilities of engine and learner at the start and after each step, nats."""
    moved: float
    """The same of the learner before and after the steps."""
    is_kept: bool
    """True if all tensors of the learner are the same bits after SYNCS further syncs."""
    stale: str
    """Error of the proof after a step that was not sent."""
    of_other_base: str
    """Error of the proof after a change of one frozen weight, or of one code in four bits, that was not sent."""


@dataclass
class RequestObservation(Observation):
    """Result of an adapter that the engine gets as a LoRA request."""

    versions: list[int]
    """Id of the adapter after each of these syncs."""
    listed: list[list[int]]
    """Ids that the engine has after each of them."""
    cached: tuple[int, int]
    """Blocks of the prefix cache before a sync and after it."""
    has_first_base: bool
    """True if the engine's frozen weights are still those of the first sync, bit for bit."""
    sent_weights: int
    """Number of syncs that sent the frozen weights."""
    shared: int
    """Number of the learner's frozen weights that are in the engine's memory."""
    faults: dict[str, str]
    """Fault that was planted -> error of the proof; empty if it found none."""


@lone_process_group()
def observe_adapters(
    policy: str, dtype: str, names: Sequence[str], method: str | None = None
) -> dict[str, Observation]:
    """Train each adapter for STEPS steps at random, each followed by a sync, then sync SYNCS times more.

    Args:
        method: `model.quantization`.
        policy: embedded policy; its output layer is separated from the embedding, so that both kinds of adapters fit.
    """
    from adapters import adapted, load, settings_of

    from grpo_ray.models.quantized import kept_modules, quantize_policy

    folder = untied(policy)
    learner = learner_of(folder, dtype)

    def new_model(name: str) -> Any:
        base = load(folder, dtype, tied=False)
        if method:
            quantize_policy(base, method, kept_modules(settings_of(name)))
        return adapted(base, name)

    return {name: Probe(learner, new_model(name)).observe() for name in names}


@lone_process_group()
def observe_request(policy: str, dtype: str, name: str, *overrides: str) -> RequestObservation:
    """Do the same with one adapter of LoRA, which the engine gets as a request."""
    import json

    from adapters import settings_of

    peft = f"model.peft={json.dumps(settings_of(name))}"
    learner = learner_of(untied(policy), dtype, peft, "engine.adapter=request", *overrides)
    return RequestProbe(learner, learner.model).observe_request()


@lone_process_group()
def observe_int4(policy: str) -> tuple[Observation, dict[str, str]]:
    """Do the same with an adapter on one base in four bits.

    Returns:
        The observation, and for each fault of the learner's base before the first sync the error of that sync.
    """
    from grpo_ray.errors import SyncError
    from grpo_ray.models.quantized import quantized_layers

    settings = ["model.quantization=int4", "model.peft={type: LORA, lora_alpha: 16}"]
    learner = learner_of(untied(policy), "bfloat16", *settings)
    layers = {
        name.removesuffix(".base_layer"): layer for name, layer in quantized_layers(learner.model.get_base_model())
    }
    block = learner.model.get_base_model().model.layers[1]
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"

    def exchange(first: Any, second: Any) -> None:
        first.data, second.data = second.data, first.data

    faults = {
        "parts exchanged": lambda: exchange(layers[f"{mlp}.gate_proj"].codes, layers[f"{mlp}.up_proj"].codes),
        "of another layer": lambda: exchange(
            layers[f"{attention}.o_proj"].codes, layers["model.layers.0.self_attn.o_proj"].codes
        ),
        "scales": lambda: layers[f"{attention}.v_proj"].scales.data.mul_(-1),
        "norm": lambda: block.input_layernorm.weight.data.neg_(),
        "bias": lambda: layers[f"{attention}.v_proj"].bias.data.neg_(),
    }
    errors = {}
    for name, change in faults.items():
        change()
        try:
            learner.engine.sync_weights()
        except SyncError as error:
            errors[name] = str(error)
        change()  # each is undone by the same change
    return Probe(learner, learner.model).observe(), errors


@lone_process_group()
def weigh_engine(folder: str, *overrides: str) -> tuple[int, int]:
    """Start a learner with an engine; return the bytes of the engine's weights, and their estimate."""
    from grpo_ray.inference.vllm_internals import engine_model
    from grpo_ray.models.memory import estimate_memory, policy_shape

    learner = learner_of(Path(folder), "bfloat16", *overrides)
    shape = policy_shape(learner.config, folder)
    memory = estimate_memory(learner.config, shape, sequence_length=64, tokens=64, gradient_checkpointing=False)
    engine = learner.engine
    slot = engine.slot.tensors() if engine.slot else {}
    stored = [*engine_model(engine.llm).parameters(), *slot.values()]
    return sum(each.nbytes for each in stored), memory.engine_weights


def untied(policy: str) -> Path:
    """Return a folder with an embedded policy whose output layer is separated from the embedding."""
    from adapters import load

    from grpo_ray.models.tokenizer import load_tokenizer

    folder = Path(tempfile.mkdtemp())
    load(policy, tied=False).save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)
    return folder


def learner_of(folder: Path, dtype: str, *overrides: str) -> Any:
    """Return a learner with an engine, in a lone process."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.learner.learner import build_learner

    settings = ["grpo.max_completion_length=16", "cluster.num_workers=1", f"model.dtype={dtype}"]
    config = load_config(None, [f"model.path={folder}", *settings, *overrides])
    return build_learner(config, model_path=str(folder), output_dir=tempfile.mkdtemp(), problems=[])


class Probe:
    """One adapter in a learner whose engine is running."""

    def __init__(self, learner: Any, model: Any) -> None:
        import torch
        from trl.trainer.utils import add_fused_lm_head

        from grpo_ray.data.arithmetic import arithmetic_problems
        from grpo_ray.models.tokenizer import tokenize_prompts

        if model is not learner.model:
            base = model.get_base_model()
            add_fused_lm_head(base, temperature=learner.temperature, outputs=("log_probs", "entropy"))
            learner.model = learner.engine.model = model
        self.learner, self.model = learner, model
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-2, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(1)
        problems = itertools.islice(arithmetic_problems("heldout"), 8)
        self.prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in problems], {})

    def observe(self) -> Observation:
        import torch
        from adapters import state

        engine = self.learner.engine
        engine.sync_weights()
        first, of_engine = self.sample()
        before, gaps = self.logps(first), [self.gap(first, of_engine)]
        for _ in range(STEPS):
            self.step()
            engine.sync_weights()
            gaps.append(self.gap(*self.sample()))
        moved = float((self.logps(first) - before).abs().mean())
        kept = copy.deepcopy(state(self.model))
        for _ in range(SYNCS):
            engine.sync_weights()
        is_kept = all(torch.equal(kept[name], tensor) for name, tensor in state(self.model).items())
        self.step()
        stale = self.refusal()
        engine.sync_weights()
        assert self.refusal() == ""
        frozen = self.frozen()
        before = frozen.clone()
        frozen.view(-1)[7] += 1
        of_other_base = self.refusal()
        frozen.copy_(before)
        return Observation(gaps, moved, is_kept, stale, of_other_base)

    def refusal(self) -> str:
        """Return the error of the proof; "" if engine and learner have the same weights."""
        from grpo_ray.errors import SyncError

        try:
            self.learner.engine.prove_weights()
        except SyncError as error:
            return str(error)
        return ""

    def frozen(self) -> Any:
        """Return a frozen weight, or the codes of one."""
        from grpo_ray.models.quantized import quantized_layers

        for _, layer in quantized_layers(self.model):
            return layer.codes.data
        base = ("up_proj.weight", "up_proj.base_layer.weight")  # not the frozen numbers of some types of adapters
        return next(each.data for name, each in self.model.named_parameters() if name.endswith(base))

    def sample(self) -> Any:
        from sampled import sample

        return sample(self.learner.engine, self.prompts, range(len(self.prompts)))

    def logps(self, completions: Any) -> Any:
        import torch
        from sampled import batch_of

        with self.learner.accelerator.autocast(), torch.no_grad():
            return self.learner.logps(batch_of(self.learner, self.prompts, completions))

    def gap(self, completions: Any, of_engine: Any) -> float:
        from sampled import batch_of

        batch = batch_of(self.learner, self.prompts, completions, of_engine)
        difference = self.logps(completions) - batch["sampling_per_token_logps"]
        return float(difference[batch["completion_mask"].bool()].abs().mean())

    def step(self) -> None:
        """Move each trained weight, in a random direction."""
        import torch

        for each in self.trained:
            each.grad = torch.randn(each.shape, generator=self.generator)
        self.optimizer.step()


class RequestProbe(Probe):
    """An adapter that the engine gets as a request."""

    def observe_request(self) -> RequestObservation:
        import torch

        from grpo_ray.inference.vllm_internals import cached_blocks

        engine = self.learner.engine
        sends, send_weights = 0, engine._send_weights

        def counted() -> None:
            nonlocal sends
            sends += 1
            send_weights()

        engine._send_weights = counted
        engine.sync_weights()
        first = {name: each.clone() for name, each in engine._parameters().items() if "lora" not in name}
        seen = self.observe()
        engine.sync_weights()
        self.sample()
        before = cached_blocks(engine.llm)
        versions, listed = [], []
        for _ in range(3):
            engine.sync_weights()
            versions.append(engine.slot.request.lora_int_id)
            listed.append(sorted(engine.slot._manager.list_adapters()))
        cached = (before, cached_blocks(engine.llm))
        present = engine._parameters()
        has_first_base = all(torch.equal(present[name], each) for name, each in first.items())
        faults = self.plant_faults()
        return RequestObservation(
            **vars(seen),
            versions=versions,
            listed=listed,
            cached=cached,
            has_first_base=has_first_base,
            sent_weights=sends,
            shared=self.count_shared(),
            faults=faults,
        )

    def count_shared(self) -> int:
        from grpo_ray.models.adapters import frozen_parameters

        memory = {each.untyped_storage().data_ptr() for each in self.learner.engine._parameters().values()}
        frozen = [parameter for _, parameter, _ in frozen_parameters(self.model)]
        return sum(each.untyped_storage().data_ptr() in memory for each in frozen)

    def plant_faults(self) -> dict[str, str]:
        """Plant faults one after another; each is taken out again, which the proof must find to be right."""
        import torch

        engine = self.learner.engine
        tensors, layer = engine._parameters(), self.model.get_base_model().model.layers[1].self_attn.v_proj
        faults: dict[str, str] = {}

        def changed(name: str, row: int, column: int) -> Any:
            element = tensors[name][row, column]

            def plant() -> Any:
                before = element.clone()
                with torch.inference_mode():
                    element.add_(1.0)
                return lambda: element.copy_(before)

            return plant

        def scaled() -> Any:
            layer.scaling["default"] *= 2
            return lambda: layer.scaling.__setitem__("default", layer.scaling["default"] / 2)

        def removed() -> Any:
            engine.slot._manager.remove_all_adapters()
            return engine.sync_weights

        fused = "model.layers.1.self_attn.qkv_proj"
        plants = {
            "frozen weight": changed(f"{fused}.weight", -1, 0),
            "first matrix": changed(f"{fused}.lora_A.0", 3, 5),
            "second matrix": changed(f"{fused}.lora_B.2", -1, 0),
            "outside of the matrices": changed(f"{fused}.lora_B.0", 0, -1),
            "scale": scaled,
            "adapter removed": removed,
        }
        for name, plant in plants.items():
            mend = plant()
            faults[name] = self.refusal()
            with torch.inference_mode():
                mend()
            assert self.refusal() == "", name
        return faults
