"""Language models with random weights and realistic completion lengths, and problems for them.

A model with random weights never ends a completion. Here three dimensions of the residual stream are reserved. The
first marks the last token of the prompt. One attention head of the first layer attends to all tokens equally, so it
computes the mark divided by the number of tokens so far, and writes that to the second; the third is a constant. The
logit of the end-of-text token depends on the last two: its probability at position n is end * exp(-delay / n). So few
completions are short, most end around the mean, and a few are long, whatever their tokens are; and every system that
samples from the model's distribution gets the same distribution of lengths.

Lengths of 400 completions of Qwen2.5-Math on 50 problems of MATH, as shares of their mean: 5 % below 0.52, a quarter
below 0.72, the median 0.91, a quarter above 1.16, 5 % above 1.70; standard deviation 0.57. The model of 20 million
parameters (`python length_model.py`): 0.29, 0.68, 0.97, 1.27, 1.81 and 0.48, with a mean of 93 tokens.

The larger shapes are those of Qwen2.5, except that the output layer does not share the embedding's weights, of which
the reserved dimensions need different values. They therefore have 0.63 and 1.78 billion parameters.
"""

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK, SHARE, CONSTANT = 0, 1, 2
"""Reserved dimensions of the residual stream: the mark, the mark divided by the number of tokens, and a constant."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, under the names of its config."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    dtype: str = "bfloat16"
    """Precision of the file. Learners compute with float32 weights all the same."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of completion lengths."""

    longest: int
    """Maximum number of tokens of a completion."""
    end: float
    delay: float
    """The probability of the end at position n, prompt included, is end * exp(-delay / n)."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and the longest completion. Prompts have at most about 60 tokens."""
        return self.longest + 256


SHAPES = {
    "20M": Shape(
        model_type="llama", vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=6, num_key_value_heads=6, dtype="float32",
    ),
    "0.5B": Shape(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2,
    ),
    "1.5B": Shape(
        model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2,
    ),
    "tiny": Shape(
        model_type="qwen2", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, dtype="float32",
    ),
}  # fmt: skip
"""Name -> sizes. "tiny" is for trying scripts."""

LENGTHS = {
    "256": Lengths(longest=256, end=0.085, delay=210.0),
    "1k": Lengths(longest=1024, end=0.085 / 3.2, delay=210.0 * 3.2),
    "8k": Lengths(longest=8192, end=0.085 / 25.6, delay=210.0 * 25.6),
    "tiny": Lengths(longest=32, end=0.15, delay=30.0),
}
"""Name -> distribution. "1k" and "8k" are that of "256", stretched; at prompts of 40 tokens the formula gives means of
392 and 3421 tokens, and 0.06 and 0.1 % of the completions reach the maximum."""

LONGEST = LENGTHS["256"].longest
"""Maximum number of tokens of a completion of the model of 20 million parameters."""


def make_model(folder: Path, shape: Shape = SHAPES["20M"], lengths: Lengths = LENGTHS["256"]) -> None:
    """Write a model and its tokenizer as a Hugging Face folder; on a GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from grpo_ray.models.demonstrations import ASSISTANT

    tokenizer = build_tokenizer_of(shape.vocab_size)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads, num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=lengths.context, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    # The model of 20 million parameters is always made on the CPU: published figures belong to these weights.
    device = "cuda" if torch.cuda.is_available() and shape.dtype != "float32" else "cpu"
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _reserve_dimensions(model, tokenizer.convert_tokens_to_ids(ASSISTANT))
        _set_end_of_text(model, tokenizer, lengths)
    model.to(getattr(torch, shape.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer_of(size: int) -> Any:
    """Return the embedded policy's tokenizer with further tokens, which occur in no text, up to a vocabulary size."""
    from tokenizers import Tokenizer

    from grpo_ray.models.warm_up import build_tokenizer

    tokenizer = build_tokenizer()
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = core["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in core["added_tokens"]}
    # In the vocabulary and not as added tokens: 150,000 of those take minutes to load.
    vocabulary |= {f"\u0120word{number}": number for number in range(len(vocabulary), size)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(core))
    return tokenizer


def _reserve_dimensions(model: Any, mark_token: int) -> None:
    """Keep all layers from writing to the reserved dimensions, except for the head that shares the mark."""
    reserved = [MARK, SHARE, CONSTANT]
    embedding, first = model.model.embed_tokens.weight, model.model.layers[0]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[reserved] = 0.0
        layer.mlp.down_proj.weight[reserved] = 0.0
    embedding[:, reserved] = 0.0
    embedding[:, CONSTANT] = 0.2
    embedding[mark_token, MARK] = 1.0
    width = first.self_attn.head_dim
    first.self_attn.q_proj.weight[:width] = 0.0  # equal scores: the head attends to all tokens equally
    first.self_attn.v_proj.weight[:width] = 0.0
    first.self_attn.v_proj.weight[0, MARK] = 1.0
    first.self_attn.o_proj.weight[:, :width] = 0.0
    first.self_attn.o_proj.weight[SHARE, 0] = 1.0
    model.lm_head.weight[:, reserved] = 0.0


def _set_end_of_text(model: Any, tokenizer: Any, lengths: Lengths) -> None:
    """Set the output layer's row of the end-of-text token, measured on random completions of some problems."""
    import torch

    head = model.lm_head.weight
    head[tokenizer.eos_token_id] = 0.0
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in problems(16)], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    share, constant, others = [], [], []
    for prompt in prompts:
        # Share times position and the constant are the same at all positions, so that 256 of them are enough.
        words = torch.randint(min(500, len(head) // 2), len(head), (min(256, lengths.longest),))
        ids = torch.cat([torch.tensor(prompt), words])[None]
        hidden = model.model(ids).last_hidden_state[0]
        positions = torch.arange(len(prompt), ids.size(1) + 1)
        hidden = hidden[len(prompt) - 1 :]
        share.append(hidden[:, SHARE] * positions)
        constant.append(hidden[:, CONSTANT])
        others.append(torch.logsumexp(hidden @ head.T, dim=1))
    head[tokenizer.eos_token_id, SHARE] = -lengths.delay / torch.cat(share).mean()
    wanted = math.log(lengths.end / (1 - lengths.end)) + torch.cat(others).mean()
    head[tokenizer.eos_token_id, CONSTANT] = wanted / torch.cat(constant).mean()


def problems(count: int) -> list[dict[str, Any]]:
    """Make sums of 4 to 16 numbers in the format of DeepMath's rows; prompts have about 20 to 60 tokens."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        numbers = [rng.randint(10, 99) for _ in range(rng.randint(4, 16))]
        question = f"What is {' + '.join(map(str, numbers))}?"
        rows.append({"prompt": [{"role": "user", "content": question}], "solution": f"${sum(numbers)}$"})
    return rows


def write_problems(file: Path, count: int) -> None:
    """Write `count` problems as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in problems(count)))


def make_files(folder: Path, tiny: bool) -> Lengths:
    """Write a benchmark's `model` and `problems.jsonl`; return the distribution of the model's completion lengths.

    Args:
        tiny: the smallest model in place of that of 20 million parameters.
    """
    shape, lengths = ("tiny", "tiny") if tiny else ("20M", "256")
    make_model(folder / "model", SHAPES[shape], LENGTHS[lengths])
    write_problems(folder / "problems.jsonl", 2000)
    return LENGTHS[lengths]


def describe(lengths: list[int], longest: int = LONGEST) -> str:
    """Describe completion lengths in one line: mean, standard deviation, and percentiles as shares of the mean."""
    ordered, mean = sorted(lengths), sum(lengths) / len(lengths)
    spread = math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths)) / mean
    at = {share: ordered[int(share * (len(ordered) - 1))] / mean for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
    return (
        f"mean {mean:.0f} tokens, deviation {spread:.2f} of it, 5/25/50/75/95 % at "
        + "/".join(f"{value:.2f}" for value in at.values())
        + f", truncated {sum(n >= longest for n in lengths) / len(lengths):.1%}"
    )


def main() -> None:
    """Generate with a model and print its size and the lengths of its completions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=200, help="number of completions to generate")
    parser.add_argument("--shape", default="20M", choices=list(SHAPES))
    parser.add_argument("--lengths", default="256", choices=list(LENGTHS))
    parser.add_argument("--keep", type=Path, help="write the model to this folder, and generate nothing")
    arguments = parser.parse_args()
    shape, lengths = SHAPES[arguments.shape], LENGTHS[arguments.lengths]
    if arguments.keep:
        make_model(arguments.keep, shape, lengths)
        return
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), shape, lengths)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(1)
        prompts = [row["prompt"] for row in problems(arguments.completions)]
        encoded = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**encoded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=lengths.longest)
        tokens = out[:, encoded["input_ids"].size(1) :]
        ended = tokens == tokenizer.eos_token_id
        print(sum(p.numel() for p in model.parameters()), "parameters")
        print(
            describe([int(row.int().argmax()) + 1 if row.any() else lengths.longest for row in ended], lengths.longest)
        )


if __name__ == "__main__":
    main()
