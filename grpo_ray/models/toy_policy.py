"""The embedded policies: 0.1M-parameter Qwen2 models with their own tokenizers, each warmed up in about a minute on a
CPU (`demonstrations.py` has their recipes).

With them the whole system can be tried without a model hub, a GPU or data.

Deterministic: the same seed gives the same weights on the same kind of CPU, for any number of cores.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.config.schema import ModelConfig
from grpo_ray.models.demonstrations import END, PAD, POLICIES, Demonstration

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


def build_toy_policy(
    seed: int = 0,
    cache: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    name: str = ModelConfig.path,
) -> Path:
    """Return the folder of a warmed-up policy; build it on first use.

    Args:
        seed: seed of the initial weights and of the order of the demonstrations.
        cache: folder that keeps built policies; by default `$GRPO_RAY_CACHE`, or else `~/.cache/grpo_ray`.
        on_progress: called with (step, number of steps) after each step of the warm-up.
        name: key of `POLICIES`.

    Returns:
        A plain Hugging Face folder: config, safetensors, tokenizer with chat template.
    """
    root = cache or Path(os.environ.get("GRPO_RAY_CACHE", Path.home() / ".cache" / "grpo_ray"))
    key = hashlib.sha256(json.dumps([POLICIES[name].recipe, seed]).encode()).hexdigest()[:10]
    folder = root / f"tiny-policy-{key}"
    if folder.is_dir():
        return folder
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar for one small file would overwrite the run's progress line
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="tiny-policy-", dir=root))
    try:
        tokenizer = build_tokenizer(name)
        warm_up(tokenizer, seed, on_progress or (lambda step, steps: None), name).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared between users
        # Renamed only when complete, so that another process never reads a partial policy. If another process was
        # faster, its folder stays.
        if not folder.is_dir():
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


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


def warm_up(
    tokenizer: "PreTrainedTokenizerFast",
    seed: int,
    on_progress: Callable[[int, int], None],
    name: str = ModelConfig.path,
) -> "Qwen2ForCausalLM":
    """Fine-tune a new model on a policy's demonstrations: next-token cross-entropy on the policy's turns only.

    torch's random state and number of threads are restored afterwards.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    policy = POLICIES[name]
    recipe = policy.recipe
    threads = torch.get_num_threads()
    # Fixed: the number of threads changes the order of additions, and so the weights.
    torch.set_num_threads(recipe.get("threads", 2))
    generator_state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
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
        steps = int(recipe["steps"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["learning_rate"], betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, recipe["learning_rate"], total_steps=steps, pct_start=0.1
        )
        for step, demonstrations in enumerate(policy.batches(recipe, seed), start=1):
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
            on_progress(step, steps)
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
