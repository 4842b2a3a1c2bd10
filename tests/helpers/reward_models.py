"""A reward model with random weights, and its outputs computed without the package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_reward_model(folder: Path, policy: Path) -> Path:
    """Write a sequence classifier of a policy's size to a folder, as users have them; return the folder."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

    torch.manual_seed(3)
    model = Qwen2ForSequenceClassification(AutoConfig.from_pretrained(policy, num_labels=1))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def score_alone(folder: Path, texts: Sequence[str]) -> list[float]:
    """Return the model's output for each text in a pass of its own, without padding."""
    import torch
    from transformers import AutoTokenizer, Qwen2ForSequenceClassification

    model = Qwen2ForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        inputs = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
        return [float(model(**each).logits[0, 0]) for each in inputs]


def rendered(folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation in the model's own chat template, as TRL renders it."""
    from transformers import AutoTokenizer
    from trl.data_utils import apply_chat_template

    return str(apply_chat_template({"messages": list(messages)}, AutoTokenizer.from_pretrained(folder))["text"])
