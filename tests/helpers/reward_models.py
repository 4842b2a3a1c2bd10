"""A reward model with random weights, and its outputs computed without the package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_reward_model(folder: Path, policy: Path) -> Path:
    """Write a sequence classifier of a policy's size to a folder; return the folder.

    Like many of them it has no padding token, neither in its config nor in its tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(policy, num_labels=1, pad_token_id=None)
    model = Qwen2ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy, pad_token=None).save_pretrained(folder)
    return folder


def score_alone(folder: Path, texts: Sequence[str]) -> list[float]:
    """Return the model's output for each text in a pass of its own, without padding.

    As in TRL, the end token stands for a padding token where there is none, so that a text is read up to the token
    before it.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2ForSequenceClassification

    model = Qwen2ForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.eos_token_id
    with torch.inference_mode():
        inputs = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
        return [float(model(**each).logits[0, 0]) for each in inputs]


def rendered(folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation in the model's own chat template, as TRL renders it."""
    from transformers import AutoTokenizer
    from trl.data_utils import apply_chat_template

    return str(apply_chat_template({"messages": list(messages)}, AutoTokenizer.from_pretrained(folder))["text"])


Cases = Sequence[tuple[list[Any], list[Any]]]
"""(B,) prompts and (B,) completions of each case."""


def score_with_trl(rank: int, folder: str, policy: str, cases: Cases) -> list[list[float]]:
    """Return the rewards of each case by a stock trainer of TRL. Runs in a worker of `worker_group`."""
    import tempfile

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sizes = {"num_generations": 2, "per_device_train_batch_size": 2}
    with tempfile.TemporaryDirectory() as output:
        args = GRPOConfig(output_dir=output, use_cpu=True, bf16=False, report_to="none", **sizes)
        rows = Dataset.from_dict({"prompt": ["-"]})
        trainer = GRPOTrainer(model=policy, reward_funcs=[folder], args=args, train_dataset=rows)
    return [
        trainer._calculate_rewards([{"prompt": each} for each in prompts], prompts, completions, [])[:, 0].tolist()
        for prompts, completions in cases
    ]
