"""The embedded policy: a 0.1M-parameter Qwen2 with its own tokenizer, warmed up in about a minute on a CPU.

It exists so that the whole system can be tried without a hub, a GPU or data. The warm-up is supervised and has two
parts: first the right way of working each kind of problem, then a mixture in which most demonstrations make a
common mistake, as text on the internet does. So the ability is there, the habit is wrong, and it is GRPO's work to
bring the one out over the other.

Deterministic: the same seed gives the same weights on the same kind of CPU, whatever the number of cores.
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

from grpo_ray.data.arithmetic import Task, tasks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

RECIPE = {
    "version": 4,  # raise it with any change of this file or of arithmetic.py that changes the weights
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
"""All that decides the weights, besides the seed. `right_part`: share of the steps that show only right work;
`mistaken_share`: how much of the rest makes the mistake."""

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_policy(seed: int = 0, cache: Path | None = None, progress: Callable[[int, int], None] | None = None) -> Path:
    """Give the folder of the warmed-up policy, building it on first use.

    cache: folder to keep it in; by default `$GRPO_RAY_CACHE` or `~/.cache/grpo_ray`.
    progress: called with (step, steps) during the warm-up.
    Returns a plain Hugging Face folder (config, safetensors, tokenizer with chat template).
    """
    root = cache or Path(os.environ.get("GRPO_RAY_CACHE", Path.home() / ".cache" / "grpo_ray"))
    key = hashlib.sha256(json.dumps([RECIPE, seed]).encode()).hexdigest()[:10]
    folder = root / f"tiny-policy-{key}"
    if folder.is_dir():
        return folder
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar for writing one small file, over ours
    root.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix="tiny-policy-", dir=root))
    try:
        tokenizer = build_tokenizer()
        warm_up(tokenizer, seed, progress or (lambda step, steps: None)).save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        # Renamed when whole: a second process never reads half a policy, and the loser of a race keeps the winner's.
        if not folder.is_dir():
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """A byte-level BPE of 384 tokens, trained on the problems' words: digits stay single, any text can be encoded."""
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
    words = [text for task in tasks("train")[:2000] for text in (task.problem().prompt[0]["content"], task.worked())]
    core.train_from_iterator(words, trainer)
    core.add_tokens([AddedToken("\\boxed{", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=END,  # else Qwen2's own default is added, a token that the model has no row for
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def warm_up(
    tokenizer: "PreTrainedTokenizerFast", seed: int, progress: Callable[[int, int], None]
) -> "Qwen2ForCausalLM":
    """Train a fresh model on worked problems: next-token cross-entropy on the completions alone."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a fixed number: the order of additions, and so the weights, depend on it
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
        train = tasks("train")
        rng = random.Random(seed)
        for step in range(steps):
            right = step < RECIPE["right_part"] * steps
            chosen = rng.sample(train, int(RECIPE["batch_size"]))
            ids, labels = _batch(tokenizer, [_demonstration(task, right, rng) for task in chosen])
            # Logits only where a label stands: most positions are question or padding.
            hidden = model.model(ids).last_hidden_state[:, :-1]
            wanted = labels[:, 1:] != -100
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress(step + 1, steps)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generator_state)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval()


def _demonstration(task: Task, right: bool, rng: random.Random) -> tuple[str, str]:
    """The question and one completion, right or (in the second part, most of the time) mistaken."""
    mistaken = not right and rng.random() < RECIPE["mistaken_share"]
    return task.problem().prompt[0]["content"], task.mistaken() if mistaken else task.worked()


def _batch(tokenizer: "PreTrainedTokenizerFast", demonstrations: list[tuple[str, str]]):
    """Token ids and labels, both (B, T) int64, right-padded; labels are -100 on the question and the padding."""
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
