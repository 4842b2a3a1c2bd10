"""Model card of an exported checkpoint: `README.md` with the metadata that the Hugging Face hub reads.

A run folder may be untrusted: its texts are shown as code, with limited length and without secrets, never as markup.
"""

import re
from collections.abc import Sequence
from typing import Any

from grpo_ray.config.sources import EMBEDDED_POLICIES, HUB_DATASETS, shown_training, train_paths
from grpo_ray.config.yaml_documents import dump_yaml
from grpo_ray.evaluation.paired import PairedComparison
from grpo_ray.export.card_facts import CardFacts, HeldoutResult
from grpo_ray.text.display import one_line, pluralize, safe_text
from grpo_ray.text.redaction import redact

FILE = "README.md"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""Pattern of an id on the hub, `owner/name`."""
DATA_SUFFIX = re.compile(r"\.(jsonl?|parquet|csv)(\.gz|\.zst)?")
COMMON_TAGS = ["trl", "ray", "vllm", "grpo_ray"]
MAX_CONFIG_CHARS, MAX_CHARS, MAX_VERSIONS = 60_000, 200, 30
"""Limits of a card: characters of the config, characters of any other text, and number of package versions."""
SETTINGS = (
    ("optimizer steps", "max_steps"),
    ("problems per step", "prompts_per_step"),
    ("completions per problem", "num_generations"),
    ("optimizer steps per generation batch", "steps_per_generation"),
    ("epochs of a generation batch", "epochs"),
    ("epochs of a generation batch", "num_iterations"),
    ("longest completion, tokens", "max_completion_length"),
    ("temperature", "temperature"),
    ("loss", "loss_type"),
    ("learning rate", "learning_rate"),
    ("KL coefficient", "beta"),
)
"""Rows of the training table: label, and field of `grpo`. Fields that the config does not set are left out."""
FINE_TUNING_SETTINGS = (
    ("optimizer steps", "max_steps"),
    ("demonstrations per step", "prompts_per_step"),
    ("longest completion, tokens", "max_completion_length"),
    ("learning rate", "learning_rate"),
)
"""The same for supervised fine-tuning, on which the other fields have no effect."""


def render_card(facts: CardFacts) -> str:
    """Render the card: metadata in YAML, then Markdown."""
    from huggingface_hub import EvalResult, ModelCardData

    base = facts.field("model", "path")
    train = facts.field("data", "train")
    named = [result for result in facts.results if result.after]
    metadata = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=[each for name in train_paths(train) if (each := _hub_dataset(name))] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*(["sft"] if facts.is_fine_tuning else ["grpo", "reinforcement-learning"]), *COMMON_TAGS],
        model_name=safe_text(facts.run, MAX_CHARS),
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=_hub_dataset(result.dataset) or "other",
                dataset_name=safe_text(" ".join(f"{result.name} {result.dataset}".split()), MAX_CHARS),
                dataset_args={"set": result.name} if result.name else None,
                metric_type="accuracy" if facts.heldout_noun == "accuracy" else "reward",
                metric_name=f"held-out {facts.heldout_noun}",
                metric_value=round(result.after.value, 4),
            )
            for result in named
            if result.after
        ]
        or None,
    )
    training = "fine-tuned on demonstrations" if facts.is_fine_tuning else "post-trained with GRPO"
    data = f"{'of' if facts.is_fine_tuning else 'on'} {_code(shown_training(train))}"
    origin = f"{_code(base)}, {training} {data}" if base else f"A policy {training}"
    sections = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {_title(facts.run)}",
        f"{origin}. {_code(facts.checkpoint)} of the run {_code(facts.run)}, after {pluralize(facts.step, 'step')}.",
        f"## Held-out {facts.heldout_noun}",
        *_heldout_section(facts),
        "## Training",
        _table(("", ""), _training_rows(facts)),
        "## How to reproduce it",
        *_reproduction(facts),
    ]
    return redact("\n\n".join(sections) + "\n")


def _heldout_section(facts: CardFacts) -> list[str]:
    """Return the paragraphs about the held-out sets."""
    if not any(result.before or result.after for result in facts.results):
        return ["Not available: this checkpoint has no measurement on held-out problems."]
    rows = [
        (
            _code(" ".join(f"{result.name} {result.dataset}".split())),
            _problems(result),
            str(result.before or "not available"),
            str(result.after or "not available"),
            _difference(result.paired),
            _p_value(result.paired),
        )
        for result in facts.results
    ]
    paragraphs = [_table(("set", "problems", facts.initial_policy, "this policy", "difference", "p"), rows)]
    paired = [result.paired for result in facts.results if result.paired]
    notes = ["In brackets: 95 % intervals."]
    for each in paired:
        problems = pluralize(each.difference.count or 0, "problem")
        sampling = "one completion" if each.num_samples == 1 else f"{each.num_samples} completions"
        notes.append(
            f"p is that of an exact sign-flip test over {problems} with {sampling} each"
            f"{' (McNemar)' if each.num_samples == 1 else ''}: {each.better} have more correct completions than with "
            f"the {facts.initial_policy}, {each.worse} fewer."
        )
    if len(paired) < len(facts.results):
        notes.append("Not available: the run has no verdicts per problem of both policies, which a paired test needs.")
    if facts.measured_checkpoints > 1 and facts.ranked_by.startswith("heldout"):
        notes.append(
            f"The run chose its best checkpoint among {facts.measured_checkpoints} by {_code(facts.ranked_by)}, so "
            f"the {facts.heldout_noun} of the best one on that set is biased upwards."
        )
    return [*paragraphs, " ".join(notes)]


def _problems(result: HeldoutResult) -> str:
    """Return the number of problems with a verdict."""
    measures = (result.before, result.after, result.paired.difference if result.paired else None)
    return str(next((each.count for each in measures if each and each.count), "?"))


def _difference(paired: PairedComparison | None) -> str:
    if paired is None:
        return "not available"
    return paired.difference.format("+.3f")


def _p_value(paired: PairedComparison | None) -> str:
    if paired is None:
        return "not available"
    return f"{paired.p_value:.4f}" if paired.p_value >= 1e-4 else "< 0.0001"


def _training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    """Return the rows of the training table; those without a value are left out."""
    workers, uses_gpu = facts.field("cluster", "num_workers"), facts.field("cluster", "use_gpu")
    memory = f" ({facts.device_gib:.0f} GiB)" if facts.device_gib else ""
    device = f"{_code(facts.device)}{memory}" if facts.device else "GPU" if uses_gpu else "CPU"
    adapter = facts.adapter_type
    rewards = None if facts.is_fine_tuning else facts.field("rewards", "functions")
    method = "supervised fine-tuning of" if facts.is_fine_tuning else "GRPO on"
    settings = FINE_TUNING_SETTINGS if facts.is_fine_tuning else SETTINGS
    rows = [
        ("base policy", facts.field("model", "path")),
        ("begun with", facts.field("run", "from_checkpoint")),
        ("method", f"{method} an adapter ({adapter}), merged here" if adapter else f"{method} all weights"),
        ("quantization", facts.field("model", "quantization")),
        ("data", shown_training(facts.field("data", "train"))),
        ("rewards", ", ".join(map(str, rewards)) if isinstance(rewards, list | tuple) else rewards),
        *((label, facts.field("grpo", name)) for label, name in settings if not _is_off(facts, name)),
    ]
    shown = [(label, _code(value)) for label, value in rows if value is not None]
    if workers is not None:
        engines = _dedicated_engines(facts)
        shown.append(("hardware", f"{_code(workers)} workers, each with one {device}{engines}" if uses_gpu else device))
    if facts.seconds:
        shown.append(("time of the steps", f"{facts.seconds / 3600:.2f} hours"))
    return shown


def _dedicated_engines(facts: CardFacts) -> str:
    """Return the end of a sentence on the GPUs of workers that adds those of dedicated engines; "" without them."""
    if facts.field("engine", "placement") != "dedicated":
        return ""
    replicas, size = (facts.field("engine", name) for name in ("replicas", "tensor_parallel_size"))
    gpus = "one GPU" if size in (1, None) else f"{_code(size)} GPUs"
    return f", and {_code(1 if replicas is None else replicas)} engines, each with {gpus} of its own"


def _is_off(facts: CardFacts, name: str) -> bool:
    """Return True for a field that has no effect because its value is 1."""
    return name in ("steps_per_generation", "epochs", "num_iterations") and facts.field("grpo", name) == 1


def _reproduction(facts: CardFacts) -> list[str]:
    """Return the paragraphs with versions, command and config."""
    if not facts.config:
        return ["Not available: the run has no readable config.yaml."]
    paragraphs = [
        "With the versions below and the settings in `config.yaml`:",
        "```bash\ngrpo-ray train config.yaml\n```",
    ]
    versions = [(_code(name), _code(version)) for name, version in list(facts.versions.items())[:MAX_VERSIONS]]
    if versions:
        paragraphs.append(_table(("package", "version"), versions))
    config = safe_text(dump_yaml(dict(facts.config)), MAX_CONFIG_CHARS)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", config)), default=0))
    paragraphs.append(
        "<details>\n<summary>config.yaml</summary>\n\n"
        "Paths of the author's machine are shortened, secrets are hidden.\n\n"
        f"{fence}yaml\n{config.rstrip()}\n{fence}\n\n</details>"
    )
    return paragraphs


def _is_hub_id(path: Any) -> bool:
    """Return True for an id on the hub; False for a path or an embedded policy."""
    return isinstance(path, str) and path not in EMBEDDED_POLICIES and bool(HUB_ID.fullmatch(path))


def _hub_dataset(name: Any) -> str | None:
    """Return a dataset's id on the hub; None if it is not a hub dataset."""
    if not isinstance(name, str):
        return None
    if name in HUB_DATASETS:
        return HUB_DATASETS[name]
    return name if HUB_ID.fullmatch(name) and not DATA_SUFFIX.search(name) else None


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(value: Any) -> str:
    """Return a value as one line of inline code, in which Markdown or HTML in the value has no effect."""
    text = one_line(value, MAX_CHARS).replace("`", "'").replace("|", "\\|")
    return f"`{text or '-'}`"


def _title(text: str) -> str:
    """Return a name for a heading: letters, digits and a few characters that are not markup."""
    return re.sub(r"[^\w .,:+-]", " ", safe_text(text, MAX_CHARS)).replace("_", "\\_").strip() or "policy"
