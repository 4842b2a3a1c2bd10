"""A policy of a few hundred weights and an engine for it, without vLLM, whose loader does what vLLM's loaders do.

It fuses queries, keys and values, gate and up, and experts; pads the vocabulary; shares the embedding with the output
layer; and in a tensor-parallel group each rank keeps its part of the matrices, and the keys and values of a head that
several ranks share.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from grpo_ray.inference.weight_proof import WeightProof, learner_weights

HIDDEN, VOCABULARY, PADDED, EXPERTS, INNER = 8, 13, 16, 2, 4
Q, K, V = 8, 4, 4
"""Rows of queries, keys and values: two heads of four for queries, and one for keys and for values."""

Weights = Iterable[tuple[str, torch.Tensor]]
Run = Callable[[int, Callable[[Any], list[Any]]], Any]


class Layer(nn.Module):
    """One layer of the learner's policy."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, rows) for rows in (Q, K, V))
        self.o_proj = nn.Linear(Q, HIDDEN, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, 2 * INNER, bias=False) for _ in range(2))
        self.experts = nn.ParameterDict({"gate_up_proj": torch.randn(EXPERTS, 2 * INNER, HIDDEN)})
        self.norm = nn.Parameter(torch.randn(HIDDEN))


class TinyPolicy(nn.Module):
    """Policy of the learner: two layers, and an output layer tied to the embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for parameter in self.parameters():
            parameter.data.mul_(3e-4)  # so small that a step of 1e-6 changes most of them in 16 bits


class TinyEngine:
    """Parameters of an engine, its loader and the proof of its weights."""

    def __init__(
        self, dtype: torch.dtype, rank: int = 0, size: int = 1, gather: Callable[[Any], list[Any]] | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.notes: list[str] = []
        self.copies: list[str] = []
        """State of the engine besides its weights."""
        self.proof = WeightProof(self.notes.append, gather or (lambda own: [own]), rank)
        rows = Q // size + K + V  # keys and values are replicated
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (PADDED // size, HIDDEN)}
        for layer in range(2):
            shapes |= {
                f"layers.{layer}.qkv_proj.weight": (rows, HIDDEN),
                f"layers.{layer}.qkv_proj.bias": (rows,),
                f"layers.{layer}.o_proj.weight": (HIDDEN, Q // size),
                f"layers.{layer}.gate_up_proj.weight": (4 * INNER // size, HIDDEN),
                f"layers.{layer}.experts.w13": (EXPERTS, 2 * INNER // size, HIDDEN),
                f"layers.{layer}.norm": (HIDDEN,),
            }
        self.parameters = {name: nn.Parameter(torch.zeros(shape, dtype=dtype), False) for name, shape in shapes.items()}

    def sync(self, weights: Weights) -> None:
        """Load the learner's weights; the first time, observe where they go."""
        if self.proof.has_layout:
            self.load(weights)
        else:
            with self.proof.recorder(self.parameters) as recorder:
                self.load(recorder.watch(weights))
            self.proof.set_layout(recorder.recorded())
        self.proof.note_precision(self.parameters)

    def prove(self, model: nn.Module) -> None:
        """Compare the engine's weights with the learner's."""
        self.proof.compare(learner_weights(model), self.parameters, lambda: self.copies)

    def load(self, weights: Weights) -> None:
        """Load weights as vLLM's loaders do: narrow both sides, and copy."""
        for name, weight in weights:
            self._load_one(name, weight)

    def _load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "embed_tokens.weight":
            part = PADDED // self.size
            rows = weight[self.rank * part : (self.rank + 1) * part]
            self.parameters[name].data[: len(rows)].copy_(rows)
            self.parameters[name].data[len(rows) :].fill_(0)
            return
        layer, _, rest = name[len("layers.") :].partition(".")
        module = rest.partition(".")[0]
        if module == "norm":
            self.parameters[name].data.copy_(weight)
        elif module == "o_proj":
            part = Q // self.size
            self.parameters[name].data.copy_(weight.narrow(1, self.rank * part, part))
        elif module == "experts":
            part = INNER // self.size
            fused = self.parameters[f"layers.{layer}.experts.w13"].data
            for half, chunk in enumerate(weight.chunk(2, dim=1)):
                for expert, each in enumerate(chunk.unbind()):
                    fused[expert].narrow(0, half * part, part).copy_(each.narrow(0, self.rank * part, part))
        elif module in ("gate_proj", "up_proj"):
            part = 2 * INNER // self.size
            place = part * (module == "up_proj")
            self._into(f"layers.{layer}.gate_up_proj.weight", place, weight.narrow(0, self.rank * part, part))
        else:
            part = Q // self.size
            place = {"q_proj": 0, "k_proj": part, "v_proj": part + K}[module]
            rows = weight.narrow(0, self.rank * part, part) if module == "q_proj" else weight
            self._into(f"layers.{layer}.qkv_proj.{rest.rpartition('.')[2]}", place, rows)

    def _into(self, name: str, place: int, rows: torch.Tensor) -> None:
        self.parameters[name].data.narrow(0, place, len(rows)).copy_(rows)


def sent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as a learner sends them."""
    for name, weight in model.named_parameters():
        yield name, weight.data


def small_step(model: nn.Module) -> None:
    """Take one step of Adam at a learning rate of 1e-6 with random gradients."""
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.randn_like(each)
    torch.optim.Adam(trained, lr=1e-6).step()


def in_threads(size: int, run: Run) -> list[Any]:
    """Call `run(rank, gather)` in threads, whose `gather` is collective; return the results or errors by rank."""
    barrier = threading.Barrier(size, timeout=60)
    slots: list[Any] = [None] * size

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(own: Any) -> list[Any]:
            slots[rank] = own
            barrier.wait()
            everyone: Sequence[Any] = list(slots)
            barrier.wait()
            return list(everyone)

        return gather

    def call(rank: int) -> Any:
        try:
            return run(rank, gather_of(rank))
        except Exception as error:  # each rank's outcome is the result
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))
