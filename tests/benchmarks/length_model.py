"""A Llama with 20 million random weights and realistic completion lengths, and problems for it.

A model with random weights never ends a completion. Here three dimensions of the residual stream are reserved. The
first marks the last token of the prompt. One attention head of the first layer attends to all tokens equally, so it
computes the mark divided by the number of tokens so far, and writes that to the second; the third is a constant. The
logit of the end-of-text token depends on the last two: its probability at position n is END * exp(-DELAY / n). So few
completions are short, most end around the mean, and a few are long, whatever their tokens are; and every system that
samples from the model's distribution gets the same distribution of lengths.

Lengths of 400 completions of Qwen2.5-Math on 50 problems of MATH, as shares of their mean: 5 % below 0.52, a quarter
below 0.72, the median 0.91, a quarter above 1.16, 5 % above 1.70; standard deviation 0.57. This model
(`python length_model.py`): 0.29, 0.68, 0.97, 1.27, 1.81 and 0.48, with a mean of 93 tokens.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

VOCABULARY, LONGEST, CONTEXT = 8192, 256, 512
END, DELAY = 0.085, 210.0
MARK, SHARE, CONSTANT = 0, 1, 2
"""Reserved dimensions of the residual stream: the mark, the mark divided by the number of tokens, and a constant."""


def make_model(folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_ray.models.toy_policy import ASSISTANT, build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f" word{n}" for n in range(VOCABULARY - len(tokenizer))])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
            max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False, dtype="float32",
        )
    ).eval()  # fmt: skip
    reserved = [MARK, SHARE, CONSTANT]
    with torch.no_grad():
        embedding, head, first = model.model.embed_tokens.weight, model.lm_head.weight, model.model.layers[0]
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[reserved] = 0.0
            layer.mlp.down_proj.weight[reserved] = 0.0
        embedding[:, reserved] = 0.0
        embedding[:, CONSTANT] = 0.2
        embedding[tokenizer.convert_tokens_to_ids(ASSISTANT), MARK] = 1.0
        width = model.config.hidden_size // model.config.num_attention_heads
        first.self_attn.q_proj.weight[:width] = 0.0  # equal scores: the head attends to all tokens equally
        first.self_attn.v_proj.weight[:width] = 0.0
        first.self_attn.v_proj.weight[0, MARK] = 1.0
        first.self_attn.o_proj.weight[:, :width] = 0.0
        first.self_attn.o_proj.weight[SHARE, 0] = 1.0
        head[:, reserved] = 0.0
        head[tokenizer.eos_token_id] = 0.0
        prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in problems(16)], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        share, constant, others = [], [], []
        for prompt in prompts:
            ids = torch.cat([torch.tensor(prompt), torch.randint(500, VOCABULARY, (LONGEST,))])[None]
            hidden = model.model(ids).last_hidden_state[0]
            positions = torch.arange(len(prompt), ids.size(1) + 1)
            hidden = hidden[len(prompt) - 1 :]
            share.append(hidden[:, SHARE] * positions)
            constant.append(hidden[:, CONSTANT])
            others.append(torch.logsumexp(hidden @ head.T, dim=1))
        head[tokenizer.eos_token_id, SHARE] = -DELAY / torch.cat(share).mean()
        wanted = math.log(END / (1 - END)) + torch.cat(others).mean()
        head[tokenizer.eos_token_id, CONSTANT] = wanted / torch.cat(constant).mean()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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


def describe(lengths: list[int]) -> str:
    """Describe completion lengths in one line: mean, standard deviation, and percentiles as shares of the mean."""
    ordered, mean = sorted(lengths), sum(lengths) / len(lengths)
    spread = math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths)) / mean
    at = {share: ordered[int(share * (len(ordered) - 1))] / mean for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
    return (
        f"mean {mean:.0f} tokens, deviation {spread:.2f} of it, 5/25/50/75/95 % at "
        + "/".join(f"{value:.2f}" for value in at.values())
        + f", truncated {sum(n >= LONGEST for n in lengths) / len(lengths):.1%}"
    )


def main() -> None:
    """Generate with the model and print its size and the lengths of its completions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=200, help="number of completions to generate")
    arguments = parser.parse_args()
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(1)
        prompts = [row["prompt"] for row in problems(arguments.completions)]
        encoded = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**encoded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=LONGEST)
        tokens = out[:, encoded["input_ids"].size(1) :]
        ended = tokens == tokenizer.eos_token_id
        print(sum(p.numel() for p in model.parameters()), "parameters")
        print(describe([int(row.int().argmax()) + 1 if row.any() else LONGEST for row in ended]))


if __name__ == "__main__":
    main()
