"""Training of the embedded policies: `python -m grpo_ray.models.warm_up` writes the folders below `policies/`.

Each policy is a new model, fine-tuned in one to two minutes on a CPU (`demonstrations.py` has the recipes).

Deterministic: the same recipe gives the same weights on the same kind of CPU, for any number of cores.
"""

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.config.schema import ModelConfig
from grpo_ray.models.demonstrations import END, PAD, POLICIES, Demonstration
from grpo_ray.models.embedded_policy import embedded_policy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
)
"""Items of a recipe that are settings of the model."""


def make_policy(name: str, folder: Path) -> None:
    """Warm a policy up, and write its folder with weights in float16; an existing folder is replaced."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = build_tokenizer(name)
    warm_up(tokenizer, name).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Only the file is rounded, since `config.json` would record the precision of a rounded model.
    weights = folder / "model.safetensors"
    rounded = {key: weight.to(torch.float16) for key, weight in load_file(weights).items()}
    save_file(rounded, weights, metadata={"format": "pt"})
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes its file private, but an installed package may be shared between users


def build_tokenizer(name: str = ModelConfig.path) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer of up to 384 tokens on the texts of an embedded policy's task.

    Every digit is one token, and any text is encodable.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    policy = POLICIES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[*policy.special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(policy.texts(), trainer)
    core.add_tokens([AddedToken("\\boxed{", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=END,  # otherwise Qwen2's default is added, a token without a row in the embedding
        extra_special_tokens=[token for token in policy.special_tokens if token not in (PAD, END)],
        padding_side="left",
        chat_template=policy.chat_template,
        clean_up_tokenization_spaces=False,
    )
    if policy.response_template is not None:
        tokenizer.response_template = policy.response_template
    return tokenizer


def warm_up(tokenizer: "PreTrainedTokenizerFast", name: str = ModelConfig.path) -> "Qwen2ForCausalLM":
    """Fine-tune a new model on a policy's demonstrations: next-token cross-entropy on the policy's turns only.

    torch's random state and number of threads are restored afterwards.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    policy = POLICIES[name]
    recipe = policy.recipe
    threads = torch.get_num_threads()
    # The number of threads changes the order of additions, and so the weights. With batches as small as these, several
    # threads also mostly wait for each other at full load, which takes minutes on a busy machine.
    torch.set_num_threads(1)
    generator_state = torch.get_rng_state()
    try:
        torch.manual_seed(recipe["seed"])
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **{key: recipe[key] for key in SHAPE},
                vocab_size=len(tokenizer),
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                dtype="float32",
            )
        )
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["learning_rate"], betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, recipe["learning_rate"], total_steps=recipe["steps"], pct_start=0.1
        )
        for demonstrations in policy.batches(recipe):
            ids, labels = _training_batch(tokenizer, demonstrations)
            # Logits are computed only at labelled positions: most positions are prompt or padding.
            hidden = model.model(ids).last_hidden_state[:, :-1]
            labelled = labels[:, 1:] != -100
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[labelled]), labels[:, 1:][labelled])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generator_state)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def _training_batch(
    tokenizer: "PreTrainedTokenizerFast", demonstrations: list[Demonstration]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return token ids and labels, both (B, T) int64, right-padded; labels are -100 outside the policy's turns."""
    import torch

    segments = iter(tokenizer([text for parts in demonstrations for text, _ in parts])["input_ids"])
    tokenized = [[(next(segments), learned) for _, learned in parts] for parts in demonstrations]
    width = max(sum(len(tokens) for tokens, _ in parts) for parts in tokenized)
    ids = torch.full((len(demonstrations), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, parts in enumerate(tokenized):
        sequence = torch.tensor([token for tokens, _ in parts for token in tokens])
        learns = torch.tensor([learned for tokens, learned in parts for _ in tokens])
        ids[row, : len(sequence)] = sequence
        labels[row, : len(sequence)] = torch.where(learns, sequence, -100)
    return ids, labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the embedded policies of the package again, or only the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m grpo_ray.models.warm_up", description=main.__doc__)
    parser.add_argument("name", nargs="?", choices=POLICIES)
    name = parser.parse_args(arguments).name
    for each in [name] if name else POLICIES:
        started = time.monotonic()
        make_policy(each, embedded_policy(each))
        print(f"{embedded_policy(each)}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
