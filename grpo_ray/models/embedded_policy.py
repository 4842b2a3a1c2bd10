"""The embedded policies: 0.1M-parameter Qwen2 models with their own tokenizers, part of the package.

With them the whole system can be tried without a model hub, a GPU or data. Each folder below `policies/` is a plain
Hugging Face folder. Its weights are stored in float16, to keep the package small, and loaded in float32, the dtype in
`config.json`. `warm_up.py` makes the folders.
"""

import hashlib
from pathlib import Path

from grpo_ray.config.schema import ModelConfig

FOLDER = Path(__file__).parent / "policies"
"""Folder of the package with one folder for each name in `EMBEDDED_POLICIES`."""


def embedded_policy(name: str = ModelConfig.path) -> Path:
    """Return the folder of an embedded policy: config, safetensors, tokenizer with chat template."""
    return FOLDER / name


def embedded_policy_digest(name: str = ModelConfig.path) -> str:
    """Return a hash of the names and contents of an embedded policy's files; 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(embedded_policy(name).iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
