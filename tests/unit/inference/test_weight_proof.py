"""Tests of the proof by checksums on a tiny engine that fuses, pads and shares weights as vLLM does: each planted fault
is caught after one step at a learning rate of 1e-6, in float32 and in bfloat16, and right weights are never accused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny_engine import HIDDEN, K, Q, TinyEngine, TinyPolicy, V, in_threads, sent, small_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_ray.errors import SyncError
from grpo_ray.inference.weight_layout import Recorded
from grpo_ray.inference.weight_proof import WeightProof, learner_weights
from grpo_ray.inference.weight_sums import weight_sum
from grpo_ray.models.adapters import merged_weights

Weights = dict[str, torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16]
both_precisions = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def synced(dtype: torch.dtype) -> tuple[TinyPolicy, TinyEngine, Weights]:
    """Return a policy one step after a sync, an engine that has proven that sync, and the weights of that time."""
    model, engine = TinyPolicy(), TinyEngine(dtype)
    engine.sync(sent(model))
    engine.prove(model)
    old = {name: weight.clone() for name, weight in sent(model)}
    small_step(model)
    return model, engine, old


@both_precisions
def test_proof_of_right_weights_passes_after_each_step(dtype: torch.dtype) -> None:
    model, engine, _ = synced(dtype)
    for _ in range(20):
        engine.sync(sent(model))
        engine.prove(model)
        engine.prove(model)  # of a generation without a sync
        small_step(model)
    assert engine.notes == []


# Faults of the weights


def stale_step(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    """Leave the sync out."""


def old_step(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync(old.items())


def stale_layer(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync((name, old[name] if "layers.1." in name else weight) for name, weight in sent(model))


def stale_expert(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync(sent(model))
    engine.parameters["layers.1.experts.w13"][1].copy_(old["layers.1.experts.gate_up_proj"][1])


def stale_embedding(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync((name, old[name] if "embed" in name else weight) for name, weight in sent(model))


def withheld_norm(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync((name, weight) for name, weight in sent(model) if name != "layers.0.norm")


def swapped_layers(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    other = {"0": "1", "1": "0"}
    engine.sync(
        (f"layers.{other[name[7]]}{name[8:]}" if name.startswith("layers.") else name, weight)
        for name, weight in sent(model)
    )


def swapped_keys_and_values(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync(
        (name.replace(".k_proj", ".#").replace(".v_proj", ".k_proj").replace(".#", ".v_proj"), weight)
        for name, weight in sent(model)
    )


def swapped_queries_and_keys(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    """Exchange rows within the fused matrix, whose plain sum stays the same."""
    engine.sync(sent(model))
    fused = engine.parameters["layers.0.qkv_proj.weight"].data
    fused[: Q + K] = torch.cat([fused[Q : Q + K], fused[:Q]])


def swapped_rows(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync(sent(model))
    gate_up = engine.parameters["layers.0.gate_up_proj.weight"].data
    gate_up[:2] = gate_up[[1, 0]]


def one_bit(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
    engine.sync(sent(model))
    norm = engine.parameters["layers.1.norm"].data
    bits = norm.view({2: torch.int16, 4: torch.int32}[norm.element_size()])
    bits[3] ^= 1


FAULTS: dict[Callable[..., None], str] = {
    stale_step: "",
    old_step: "",
    stale_layer: r"layers\.1\.",
    stale_expert: r"layers\.1\.experts\.gate_up_proj differ.*layers\.1\.experts\.w13",
    stale_embedding: r"checksums of embed_tokens\.weight differ",
    withheld_norm: r"checksums of layers\.0\.norm differ",
    swapped_layers: r"layers\.0\.",
    swapped_keys_and_values: r"layers\.0\.k_proj\.weight, layers\.0\.k_proj\.bias, layers\.0\.v_proj\.weight",
    swapped_queries_and_keys: r"layers\.0\.q_proj\.weight, layers\.0\.k_proj\.weight differ"
    r".*in the engine's layers\.0\.qkv_proj\.weight",
    swapped_rows: r"checksums of layers\.0\.gate_proj\.weight differ",
    one_bit: r"checksums of layers\.1\.norm differ",
}
"""Fault -> the weights that the error names."""


@both_precisions
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_proof_finds_fault_of_one_small_step(fault: Callable[..., None], dtype: torch.dtype) -> None:
    model, engine, old = synced(dtype)
    with pytest.raises(SyncError, match=f"does not hold the learner's weights.*{FAULTS[fault]}"):
        fault(engine, model, old)
        engine.prove(model)


def test_proof_first_load_in_the_wrong_order_raises() -> None:
    model, engine = TinyPolicy(), TinyEngine(torch.float32)
    load = engine._into
    place = {0: 0, Q: Q + V, Q + K: Q}

    def keys_behind_values(name: str, at: int, rows: torch.Tensor) -> None:
        load(name, place[at] if "qkv" in name else at, rows)

    engine._into = keys_behind_values  # type: ignore[method-assign, assignment]
    with pytest.raises(SyncError, match=r"qkv_proj.* has the parts q_proj, v_proj, k_proj in this order"):
        engine.sync(sent(model))


def test_proof_of_a_weight_that_is_cut_short_raises() -> None:
    model, engine = TinyPolicy(), TinyEngine(torch.float32)
    load = engine._load_one

    def cut(name: str, weight: torch.Tensor) -> None:
        if name != "layers.0.norm":
            load(name, weight)
            return
        norm = engine.parameters[name].data
        norm[: HIDDEN - 2].copy_(weight[: HIDDEN - 2])
        norm[HIDDEN - 2 :].fill_(0)  # as if it were padding

    engine._load_one = cut  # type: ignore[method-assign]
    with pytest.raises(SyncError, match=rf"of {HIDDEN} elements of layers\.0\.norm only {HIDDEN - 2} were copied"):
        engine.sync(sent(model))


def test_proof_without_a_sent_weight_raises() -> None:
    model, engine = TinyPolicy(), TinyEngine(torch.float32)
    engine.sync(sent(model))
    model.extra = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(SyncError, match="extra never reached it"):
        engine.prove(model)


def test_proof_of_widened_bias_compares_the_loaded_precision() -> None:
    model, engine = TinyPolicy(), TinyEngine(torch.bfloat16)
    engine.sync(sent(model))
    bias = engine.parameters["layers.0.qkv_proj.bias"]
    bias.data = bias.data.float()  # as a kernel of the CPU backend needs it
    engine.prove(model)
    engine.sync(sent(model))  # now with the learner's 32 bits
    engine.prove(model)


# Copies of older weights


def test_proof_after_change_with_copies_of_older_weights_raises() -> None:
    model, engine, _ = synced(torch.float32)
    engine.copies = ["keys and values of earlier prompts"]
    engine.sync(sent(model))
    with pytest.raises(SyncError, match="after they have changed it still keeps keys and values of earlier prompts"):
        engine.prove(model)


def test_proof_of_unchanged_weights_with_copies_passes() -> None:
    model, engine, _ = synced(torch.float32)
    engine.sync(sent(model))
    engine.prove(model)
    engine.copies = ["keys and values of earlier prompts"]  # of a generation with these weights
    engine.prove(model)


# Adapters


def with_adapter() -> Any:
    """Return a policy with an adapter whose update is not zero."""
    torch.manual_seed(1)
    model = get_peft_model(TinyPolicy(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def only_base(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights without the adapter, which is forgotten."""
    for name, weight in model.get_base_model().named_parameters():
        if "lora_" not in name:
            yield name.replace(".base_layer", ""), weight.data


@both_precisions
def test_proof_of_merged_adapter_passes_and_missing_one_is_found(dtype: torch.dtype) -> None:
    model, engine = with_adapter(), TinyEngine(dtype)
    engine.sync(merged_weights(model))
    engine.prove(model)
    engine.sync(only_base(model))
    with pytest.raises(SyncError, match=r"layers\.0\.q_proj\.weight, layers\.0\.up_proj\.weight"):
        engine.prove(model)


def test_proof_of_stale_adapter_raises() -> None:
    model, engine = with_adapter(), TinyEngine(torch.float32)
    engine.sync(merged_weights(model))
    engine.prove(model)
    small_step(model)
    with pytest.raises(SyncError, match=r"layers\.0\.q_proj\.weight"):
        engine.prove(model)


def test_learner_weights_equal_those_that_are_sent() -> None:
    model = with_adapter()
    read, merged = dict(learner_weights(model)), dict(merged_weights(model))
    assert read.keys() == merged.keys() and all(torch.equal(read[name], merged[name]) for name in read)


# Tensor parallel


def share(size: int, fault: Callable[[TinyEngine, TinyPolicy, Weights], None] | None = None) -> list[Any]:
    """Sync an engine of several ranks, step, sync again, with a fault on its last rank; return the ranks' errors."""
    models = [TinyPolicy() for _ in range(size)]  # not in the threads, which share the generator of random numbers

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> list[str]:
        model, engine = models[rank], TinyEngine(torch.bfloat16, rank, size, gather)
        engine.sync(sent(model))
        engine.prove(model)
        old = {name: weight.clone() for name, weight in sent(model)}
        for parameter in model.parameters():
            parameter.data.mul_(1 + 2**-6)  # so that each weight changes in 16 bits
        if fault is not None and rank == size - 1:
            fault(engine, model, old)
        else:
            engine.sync(sent(model))
        engine.prove(model)
        return engine.notes

    return in_threads(size, work)


def test_tensor_parallel_parts_add_up() -> None:
    assert share(2) == [[], []]


def test_proof_of_sharded_weight_adds_up_the_parts_of_all_workers() -> None:
    """The learner's weight is divided over two workers, of which this is the first one."""
    model, engine, name = TinyPolicy(), TinyEngine(torch.float32), "layers.0.o_proj.weight"
    weights = dict(sent(model))
    first, second = weights[name].chunk(2)
    part_of_other = [weight_sum(second, second.stride(), first.numel()).item()]
    engine.proof = WeightProof(engine.notes.append, lambda own: [own], 0, lambda own: [own, part_of_other])
    engine.sync(sent(model))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        shard = DTensor.from_local(first, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        sharded = list((weights | {name: shard}).items())
        engine.proof.compare(sharded, engine.parameters, list)
        part_of_other[0] += 1
        with pytest.raises(SyncError, match=rf"checksums of {name} differ; {name} has {weights[name].numel()} "):
            engine.proof.compare(sharded, engine.parameters, list)
    finally:
        dist.destroy_process_group()


def test_proof_of_weight_on_another_rank_reads_its_precision() -> None:
    weights = {"a": torch.tensor([1 / 3]), "b": torch.tensor([1 / 7])}  # rounded in 16 bits

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> None:
        held = "ab"[rank]  # as in a pipeline
        parameters = {held: torch.zeros(1, dtype=torch.bfloat16)}
        proof = WeightProof(print, gather, rank)
        with proof.recorder(parameters) as recorder:
            for name, weight in recorder.watch(weights.items()):
                if name == held:
                    parameters[held].copy_(weight)
        proof.set_layout(recorder.recorded())
        proof.note_precision(parameters)
        proof.compare(weights.items(), parameters, list)

    assert in_threads(2, work) == [None, None]


@pytest.mark.parametrize(
    ("stale", "named"),
    {
        "o_proj": r"layers\.0\.o_proj\.weight, layers\.1\.o_proj\.weight differ",  # a part
        "k_proj": r"layers\.0\.k_proj\.weight",  # a replica, of which the other is right
        "embed": r"embed_tokens\.weight differ",
        "experts": r"layers\.0\.experts\.gate_up_proj",
        "norm": r"layers\.0\.norm",
    }.items(),
)
def test_tensor_parallel_stale_part_is_found_on_all_ranks(stale: str, named: str) -> None:
    def fault(engine: TinyEngine, model: TinyPolicy, old: Weights) -> None:
        engine.sync((name, old[name] if stale in name else weight) for name, weight in sent(model))

    errors = share(2, fault)
    assert all(isinstance(error, SyncError) for error in errors)
    for error in errors:
        with pytest.raises(SyncError, match=named):
            raise error


def test_tensor_parallel_part_that_never_arrives_is_found_at_the_first_sync() -> None:
    models = [TinyPolicy() for _ in range(2)]

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> None:
        engine = TinyEngine(torch.float32, rank, 2, gather)
        load = engine._load_one
        if rank == 1:
            engine._load_one = lambda name, weight: None if "layers.1.o_proj" in name else load(name, weight)  # type: ignore[method-assign]
        engine.sync(sent(models[rank]))

    for error in in_threads(2, work):
        assert isinstance(error, SyncError) and "layers.1.o_proj.weight" in str(error)


# What cannot be compared


def test_proof_of_computed_weight_is_left_out_and_said_once() -> None:
    model, engine = TinyPolicy(), TinyEngine(torch.float32)
    load = engine._load_one

    def shifted(name: str, weight: torch.Tensor) -> None:
        load(name, weight + 1 if name == "layers.0.norm" else weight)

    engine._load_one = shifted  # type: ignore[method-assign]
    for _ in range(2):
        engine.sync(sent(model))
        engine.prove(model)
    assert len(engine.notes) == 1
    assert "leave out" in engine.notes[0] and "layers.0.norm: vLLM computes its values" in engine.notes[0]
    engine.sync((name, weight + ("layers.1.norm" in name)) for name, weight in sent(model))
    with pytest.raises(SyncError, match=r"checksums of layers\.1\.norm differ"):
        engine.prove(model)


@pytest.mark.parametrize(("count", "named", "rest"), [(3, 3, ""), (4, 3, "; and 1 more"), (6, 3, "; and 3 more")])
def test_tensors_that_are_left_out_are_named_up_to_three(count: int, named: int, rest: str) -> None:
    engine = TinyEngine(torch.float32)
    lost = {f"w{number}": 2 for number in range(count)}
    engine.proof.set_layout(Recorded((), lost, {}))
    (note,) = engine.notes
    assert note.count(": no parameter of the engine is a copy of it") == named
    assert f"leave out {count} of the engine's tensors" in note and note.endswith(f"is a copy of it{rest})")


def test_proof_of_quantized_engine_says_so_once_and_still_finds_old_copies() -> None:
    model, engine = TinyPolicy(), TinyEngine(torch.float32)
    for _ in range(2):
        engine.proof.set_quantized("fp8")
        engine.prove(model)
    assert len(engine.notes) == 1 and "quantizes the learner's weights (fp8)" in engine.notes[0]
    small_step(model)
    engine.copies = ["packed weights"]
    with pytest.raises(SyncError, match="packed weights"):
        engine.prove(model)


def test_tied_embedding_counts_once() -> None:
    names = [name for name, _ in learner_weights(TinyPolicy())]
    assert "embed_tokens.weight" in names and "lm_head.weight" not in names
    assert TinyPolicy().lm_head.weight.shape == (13, HIDDEN)
