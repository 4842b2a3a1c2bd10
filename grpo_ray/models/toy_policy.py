"""The embedded toy policy: a 0.1M-parameter Qwen2 with its own tokenizer, warmed up in about a minute on a CPU.

With it the whole system can be tried without a model hub, a GPU or data. The warm-up is supervised fine-tuning in two
parts: first on correct worked solutions of each kind of problem, then on a mixture in which most demonstrations make a
common mistake, as text on the internet does. The policy therefore has the ability but prefers the mistake, and GRPO
has to reverse that preference.

Deterministic: the same seed gives the same weights on the same kind of CPU, for any number of cores.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.data.arithmetic import ArithmeticTask, list_tasks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

RECIPE = {
    "version": 4,  # increase it with every change of this file or of data/arithmetic.py that changes the weights
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 8192,
    "batch_size": 96,
    "steps": 1000,
    "learning_rate": 6e-3,
    "right_part": 0.7,
    "mistaken_share": 0.75,
}
"""Everything except the seed that determines the weights; its hash is part of the cache folder's name.

`right_part`: fraction of the steps, from the first on, with correct demonstrations only.
`mistaken_share`: fraction of the demonstrations in the remaining steps that make the mistake."""

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_toy_policy(
    seed: int = 0, cache: Path | None = None, on_progress: Callable[[int, int], None] | None = None
) -> Path:
    """Return the folder of the warmed-up policy; build it on first use.

    Args:
        seed: seed of the initial weights and of the order of the demonstrations.
        cache: folder that keeps built policies; by default `$GRPO_RAY_CACHE`, or else `~/.cache/grpo_ray`.
        on_progress: called with (step, number of steps) after each step of the warm-up.

    Returns:
        A plain Hugging Face folder: config, safetensors, tokenizer with chat template.
    """
    root = cache or Path(os.environ.get("GRPO_RAY_CACHE", Path.home() / ".cache" / "grpo_ray"))
    key = hashlib.sha256(json.dumps([RECIPE, seed]).encode()).hexdigest()[:10]
    folder = root / f"tiny-policy-{key}"
    if folder.is_dir():
        return folder
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar for one small file would overwrite the run's progress line
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="tiny-policy-", dir=root))
    try:
        tokenizer = build_tokenizer()
        warm_up(tokenizer, seed, on_progress or (lambda step, steps: None)).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.chmod(0o755)  # mkdtemp makes it private, but a cache may be shared between users
        # Renamed only when complete, so that another process never reads a partial policy. If another process was
        # faster, its folder stays.
        if not folder.is_dir():
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer of 384 tokens on the problems: every digit is one token, any text encodable."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [
        text
        for task in list_tasks("train")[:2000]
        for text in (task.problem().prompt[0]["content"], task.worked_solution())
    ]
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken("\\boxed{", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=END,  # otherwise Qwen2's default is added, a token without a row in the embedding
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def warm_up(
    tokenizer: "PreTrainedTokenizerFast", seed: int, on_progress: Callable[[int, int], None]
) -> "Qwen2ForCausalLM":
    """Fine-tune a new model on worked problems: next-token cross-entropy on the completions only.

    torch's random state and number of threads are restored afterwards.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # fixed: the number of threads changes the order of additions, and so the weights
    generator_state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        shape = {key: RECIPE[key] for key in list(RECIPE)[1:7]}
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **shape,
                vocab_size=len(tokenizer),
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                dtype="float32",
            )
        )
        model.train()
        steps = int(RECIPE["steps"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["learning_rate"], betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RECIPE["learning_rate"], total_steps=steps, pct_start=0.1
        )
        train = list_tasks("train")
        rng = random.Random(seed)
        for step in range(steps):
            only_correct = step < RECIPE["right_part"] * steps
            sampled = rng.sample(train, int(RECIPE["batch_size"]))
            ids, labels = _training_batch(tokenizer, [_demonstration(task, only_correct, rng) for task in sampled])
            # Logits are computed only at labelled positions: most positions are prompt or padding.
            hidden = model.model(ids).last_hidden_state[:, :-1]
            labelled = labels[:, 1:] != -100
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[labelled]), labels[:, 1:][labelled])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            on_progress(step + 1, steps)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generator_state)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def _demonstration(task: ArithmeticTask, only_correct: bool, rng: random.Random) -> tuple[str, str]:
    """Return the question and one completion: correct, or in the second part of the warm-up mostly mistaken."""
    mistaken = not only_correct and rng.random() < RECIPE["mistaken_share"]
    return task.problem().prompt[0]["content"], task.mistaken_solution() if mistaken else task.worked_solution()


def _training_batch(
    tokenizer: "PreTrainedTokenizerFast", demonstrations: list[tuple[str, str]]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return token ids and labels, both (B, T) int64, right-padded; labels are -100 on the question and the padding."""
    import torch

    questions = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question, _ in demonstrations],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    completions = tokenizer([text for _, text in demonstrations])["input_ids"]
    end = [tokenizer.eos_token_id]
    width = max(len(q) + len(c) + 1 for q, c in zip(questions, completions, strict=True))
    ids = torch.full((len(demonstrations), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (question, completion) in enumerate(zip(questions, completions, strict=True)):
        sequence = torch.tensor(question + completion + end)
        ids[row, : len(sequence)] = sequence
        labels[row, len(question) : len(sequence)] = sequence[len(question) :]
    return ids, labels
