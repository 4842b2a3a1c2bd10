"""Check of the sizes in a policy's folder before libraries read it: a checkpoint may be untrusted.

A config of a kilobyte may declare a model of any size, which libraries begin to build before they read the weights;
a header of weights may declare tensors that the file does not have. Only JSON is parsed here, in bounded memory.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_ray.errors import CheckpointError

FILE_BYTES = 1 << 26
"""Largest file that libraries read as a whole, such as a tokenizer's; configs and templates have a lower limit."""
CONFIG_BYTES = 1 << 22
"""Largest config or chat template."""
HEADER_BYTES = 1 << 25
"""Largest header of a safetensors file: hundreds of thousands of tensors."""
LARGEST_NUMBER = 1 << 40
"""Largest integer in a config."""
LARGEST_CONTEXT = 1 << 30
"""Largest context in tokens, since engines allocate tables of this size."""
MAX_ENTRIES = 100_000
"""Maximum number of entries of a list in a config."""
CONFIGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "quantization.json",
)
TEXTS = (
    *CONFIGS,
    "adapter_config.json",
    "tokenizer.json",
    "added_tokens.json",
    "vocab.json",
    "model.safetensors.index.json",
)
"""JSON files that libraries parse."""
PARSED = (".json", ".jsonl", ".jinja", ".txt", ".model", ".spm", ".tiktoken", ".bpe", ".py", ".yaml", ".yml")
"""Suffixes of files that libraries read into memory as a whole. Other files, such as weights of other frameworks, are
not read."""
TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges")
"""Prefixes of the names of a tokenizer's files, with any suffix."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
"""Suffixes of files with weights whose headers are not checked."""
NUMBERS_PER_BYTE = 8
"""Maximum number of weights in a byte of such a file: quantized to one bit."""
BYTES_PER_TENSOR = 64
"""Minimum size of a tensor in such a file with its name, bytes."""
BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
        "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}  # fmt: skip
"""Precision in safetensors -> bits of a number; tensors of other precisions are not checked."""


def require_plausible_policy(folder: str | Path, has_weights: bool = True) -> None:
    """Check the sizes that a local folder of a policy declares; hub ids, and folders without a policy, pass.

    Args:
        has_weights: False if the folder may be a copy without weights; without them, only fixed limits apply.

    Raises:
        CheckpointError: a file exceeds its limit, or is not JSON; the config declares a larger model than the weights
            can hold; or the header of weights does not match their file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not (path.suffix in PARSED or path.name.startswith(TOKENIZER_PREFIXES)):
            continue
        limit = CONFIG_BYTES if path.name in CONFIGS or path.suffix == ".jinja" else FILE_BYTES
        if (size := path.stat().st_size) > limit:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes; the limit is {limit}")
    for name in TEXTS:
        if (folder / name).is_file():
            _parse(folder / name)
    shapes = [shape for path in sorted(folder.rglob("*.safetensors")) for shape in _tensor_shapes(path)]
    if not (folder / CONFIGS[0]).is_file():
        return
    tensors, numbers = len(shapes), sum(map(math.prod, shapes))
    if not shapes:
        others = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in OTHER_WEIGHTS)
        tensors, numbers = others // BYTES_PER_TENSOR, others * NUMBERS_PER_BYTE
    _require_plausible_config(folder / CONFIGS[0], (tensors, numbers) if has_weights or shapes else None)


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON: {str(error)[:200]}") from None


def _require_plausible_config(path: Path, weights: tuple[int, int] | None) -> None:
    """Compare the sizes that a config declares with the weights.

    Args:
        weights: maximum number of tensors and of elements in the weights; None: unknown, so only fixed limits apply.
    """
    config = _parse(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object")
    for name, value in _entries(config):
        if isinstance(value, list) and len(value) > MAX_ENTRIES:
            raise CheckpointError(f"{path}: {name} has {len(value)} entries; the limit is {MAX_ENTRIES}")
        largest = LARGEST_CONTEXT if name.rpartition(".")[2] == "max_position_embeddings" else LARGEST_NUMBER
        if isinstance(value, int) and abs(value) > largest:
            raise CheckpointError(f"{path}: {name} is larger than {largest}")
    if weights is None:
        return
    tensors, stored = weights
    for where, part in (("", config), ("text_config.", config.get("text_config"))):
        sizes = part if isinstance(part, Mapping) else {}
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if (layers := _size(sizes, name)) > tensors:
                raise CheckpointError(f"{path}: {where}{name} is {layers}, and the weights have {tensors} tensors")
        hidden = _size(sizes, "hidden_size") or _size(sizes, "n_embd") or 1
        for name in ("vocab_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_attention_heads",
                     "num_local_experts", "n_routed_experts", "num_key_value_heads", "head_dim"):  # fmt: skip
            if (size := _size(sizes, name)) * (hidden if "size" in name else 1) > stored:
                raise CheckpointError(
                    f"{path}: {where}{name} is {size} and hidden_size {hidden}, and the weights have {stored} numbers"
                )


def _size(sizes: Mapping[str, Any], name: str) -> int:
    value = sizes.get(name)
    return value if isinstance(value, int) else 0


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted name -> value of all nested entries."""
    left = [("", value)]
    while left:
        name, each = left.pop()
        yield name, each
        if isinstance(each, dict):
            left.extend((f"{name}.{key}".lstrip("."), item) for key, item in each.items())
        elif isinstance(each, list):
            left.extend((name, item) for item in each[:MAX_ENTRIES])


def _tensor_shapes(path: Path) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a safetensors file, from its header. Raises CheckpointError."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, HEADER_BYTES):
            raise CheckpointError(f"{path} is damaged: its header declares {length} bytes, and the file has {size}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            shapes, places = [], []
            for entry in header.values():
                shape, (begin, end) = tuple(map(int, entry["shape"])), entry["data_offsets"]
                bits = BITS.get(entry["dtype"])
                is_plausible = all(0 <= each < LARGEST_NUMBER for each in shape) and 0 <= begin <= end
                if not is_plausible or (bits and math.prod(shape) * bits != 8 * (end - begin)):
                    raise ValueError("the size of a tensor is not that of its shape")
                shapes.append(shape)
                places.append((begin, end))
            end_of_last = 0
            for begin, end in sorted(places):
                if begin != end_of_last:
                    raise ValueError("tensors overlap, or have gaps between them")
                end_of_last = end
            if end_of_last != size - 8 - length:
                raise ValueError(f"its tensors take {end_of_last} bytes, and the file has {size - 8 - length} for them")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path} is damaged: its header cannot be used: {reason}") from None
    return shapes
