"""Example configs that come with the package, for `--example NAME`, and the first files that `grpo-ray init` writes.

`configs/` has one YAML for each example; its head lists hardware, time, expected reward and the command. In a clone,
`jobs/configs` is a link to that folder.
"""

import re
import shlex
from pathlib import Path

from grpo_ray.config.similar_names import suggestion
from grpo_ray.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
FIRST_CONFIG = Path(__file__).parent / "my_run.yaml"
"""YAML of a first run: the embedded policy and problems, and the lines to change for others."""
FIRST_REWARD = Path(__file__).parent / "my_rewards.py"
"""Module with a reward function, which that YAML names in a comment."""


def example_names() -> list[str]:
    """Return the names of all examples, those for the CPU first."""
    paths = sorted(CONFIGS.glob("*.yaml"), key=lambda path: (_needs_gpu(path), path.stem))
    return [path.stem for path in paths]


def example_path(name: str) -> Path:
    """Return the YAML of an example.

    Raises:
        ConfigError: there is none of this name.
    """
    names = example_names()
    if name not in names:
        raise ConfigError(
            f"--example {name}: there is no such example, but {', '.join(names)}{suggestion(name, names)}"
        )
    return CONFIGS / f"{name}.yaml"


def describe_examples() -> str:
    """Describe each example by the first sentence of its YAML and its hardware, one per line."""
    names = example_names()
    width = max(map(len, names))
    lines = []
    for name in names:
        head = _head(CONFIGS / f"{name}.yaml")
        first = re.split(r"(?<=[.:])\s", head, maxsplit=1)[0].rstrip(":.")
        hardware = re.search(r"Hardware: (.*?)\.(?:\s|$)", head)
        lines.append(f"{name:{width}s}  {first} ({hardware[1] if hardware else 'hardware not stated'})")
    return "\n".join(lines)


def write_first_files(target: Path, example: str | None = None) -> list[Path]:
    """Write a config to start from, and a reward function beside it.

    Args:
        target: a path that ends in `.yaml` or `.yml` is the config's own; any other is a folder, which is created, and
            gets `my_run.yaml`.
        example: example to copy; None writes a short config with comments, and `my_rewards.py`.

    Returns:
        The files that were written, the config first.

    Raises:
        ConfigError: a file exists already, or cannot be written.
    """
    config = target if target.suffix in (".yaml", ".yml") else target / FIRST_CONFIG.name
    if example is None:
        files = {config: FIRST_CONFIG.read_text(encoding="utf-8")}
        files[config.with_name(FIRST_REWARD.name)] = FIRST_REWARD.read_text(encoding="utf-8")
    else:
        # The commands in the head then start the copy.
        text = example_path(example).read_text(encoding="utf-8")
        files = {config: text.replace(f"--example {example}", shlex.quote(config.name))}
    if existing := [str(path) for path in files if path.exists()]:
        raise ConfigError(f"there is {' and '.join(existing)} already; name another folder or file, or delete it")
    try:
        config.parent.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}; name another folder or file") from None
    return list(files)


def _head(path: Path) -> str:
    """Return the text of the comment at the top of a YAML, on one line."""
    found = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
    return " ".join(line.removeprefix("#").strip() for line in found[0].splitlines()) if found else ""


def _needs_gpu(path: Path) -> bool:
    return re.search(r"^  use_gpu: true$", path.read_text(encoding="utf-8"), re.MULTILINE) is not None
