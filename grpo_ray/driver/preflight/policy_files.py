"""The policy's config and tokenizer on the driver, without its weights."""

import atexit
import os
import shutil
import tempfile
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.errors import ConfigError
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.storage.filesystem import open_filesystem
from grpo_ray.storage.retry import retry_transient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHT_FILES = ("safetensors", "bin", "pt", "pth", "gguf")
"""Extensions of the files that `fetch_policy_files` leaves out."""


def fetch_policy_files(path: str) -> str:
    """Return a local folder (or hub id) with the policy's config and tokenizer; its weights are not fetched.

    Args:
        path: `model.path`.
    """
    if path in EMBEDDED_POLICIES:
        return str(embedded_policy(path))
    return _download(path) if "://" in path else os.path.expanduser(path)


@lru_cache(maxsize=4)
def _download(uri: str) -> str:
    local = tempfile.mkdtemp(prefix="grpo_ray-")
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    retry_transient(partial(_copy_files, uri, local))
    return local


def _copy_files(uri: str, local: str) -> None:
    import pyarrow.fs

    filesystem, remote = open_filesystem(uri)
    for file in filesystem.get_file_info(pyarrow.fs.FileSelector(remote)):
        if file.is_file and file.extension not in WEIGHT_FILES:
            pyarrow.fs.copy_files(file.path, f"{local}/{file.base_name}", source_filesystem=filesystem)


def load_policy_tokenizer(
    path: str, local: str, trust_remote_code: bool, limits_template: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the policy's tokenizer.

    Args:
        path: `model.path`, for messages.
        local: result of `fetch_policy_files`.
        limits_template: render its chat template in a process with limits.

    Raises:
        ConfigError: it cannot be read.
    """
    from grpo_ray.models.tokenizer import load_tokenizer

    try:
        return load_tokenizer(local, trust_remote_code, limits_template)
    except Exception as error:  # the files may be untrusted, and the library `tokenizers` raises no narrower class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path={path}: its tokenizer cannot be read: {reason}") from None
