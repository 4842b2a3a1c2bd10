"""Tests of the code in the documents: configs load and read their problems, Python blocks and commands are valid.

`helpers/documents.py` reads the code of README, docs, notebooks and job files. Nothing is started here.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from documents import ROOT, Block, Command, blocks, commands
from stores_on_disk import stores_on_disk

import grpo_ray
from grpo_ray.cli import build_parser, sort_overrides
from grpo_ray.config.loader import from_mapping, load_config
from grpo_ray.config.recorded import evaluation_settings
from grpo_ray.config.schema import SECTIONS, Config
from grpo_ray.config.sources import HUB_DATASETS, HUB_SPLITS, train_paths
from grpo_ray.config.sweep_file import load_sweep
from grpo_ray.data import gsm8k
from grpo_ray.data.registry import DATASETS, EMBEDDED
from grpo_ray.data.stream import open_splits
from grpo_ray.driver.stage_config import Stages, load_stages
from grpo_ray.driver.stage_config import has_stages as has_stages_of
from grpo_ray.examples import FIRST_CONFIG, example_names, example_path
from grpo_ray.inference.rollout_function import load_rollout_function
from grpo_ray.rewards.registry import load_rewards
from grpo_ray.sweep.trials import TrialConfigs, list_trials
from grpo_ray.tools.definitions import load_definition

NOT_CONFIGS = {
    "cluster.yaml": "a cluster for Ray's cluster launcher",
    "jobs/rayjob.yaml": "a RayJob for KubeRay",
    "jobs/runtime_env.yaml": "a runtime environment for Ray's job server",
}
"""YAML files, and documents with YAML blocks, that have no section of ours -> what they are."""

HUB_FILES = {name: f"hf://datasets/{id}/data" for name, id in HUB_DATASETS.items()} | {"gsm8k": gsm8k.FOLDER}
"""Built-in dataset -> its folder on the hub."""

PLACEHOLDERS = {"CONFIG.yaml", "section.field=value"}
"""Words of a command in place of a file and of overrides."""

OTHER_PROGRAMS = {"ray", "kubectl", "ssh", "export", "chmod", "sbatch", "docker", "uv", "echo", "source"}
"""Programs in shell blocks whose arguments are not checked here, except for files and for our commands among them."""

JOB_COMMANDS = {"jobs/train.py": "train", "jobs/evaluate.py": "eval"}
"""Job file -> the command of grpo-ray that its arguments go to."""


# --- YAML ---


def example_files() -> list[Path]:
    return [FIRST_CONFIG, *map(example_path, example_names())]


def yaml_files() -> list[Block]:
    return [
        Block(str(path.relative_to(ROOT)), "yaml", path.read_text(encoding="utf-8"))
        for path in (*sorted(ROOT.glob("*.yaml")), *sorted((ROOT / "jobs").rglob("*.yaml")), *example_files())
    ]


def is_config(block: Block) -> bool:
    """Return True if every top-level key is a section of a config, or `stages`."""
    content = yaml.safe_load(block.text)
    return isinstance(content, dict) and set(content) <= {*SECTIONS, "stages"}


def has_stages(block: Block) -> bool:
    """Return True for a YAML with stages."""
    return "stages" in yaml.safe_load(block.text)


def is_sweep(block: Block) -> bool:
    """Return True for a sweep file, which has exactly one of these keys."""
    return not {"vary", "trials", "draw"}.isdisjoint(yaml.safe_load(block.text))


YAML = [*yaml_files(), *blocks("yaml")]
SWEEPS = [block for block in YAML if is_sweep(block)]
ALL_CONFIGS = [block for block in YAML if block.source not in NOT_CONFIGS and not is_sweep(block)]
CONFIGS = [block for block in ALL_CONFIGS if not has_stages(block)]
STAGES = [block for block in ALL_CONFIGS if has_stages(block)]


def test_yaml_that_is_no_config_is_named() -> None:
    assert CONFIGS
    assert [str(block) for block in ALL_CONFIGS if not is_config(block)] == []
    named = {block.source for block in YAML if not is_config(block) and not is_sweep(block)}
    assert set(NOT_CONFIGS) == named, "NOT_CONFIGS has a stale entry"


def test_sweeps_load_with_their_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(SWEEPS) >= 2
    for block in SWEEPS:
        path = tmp_path / (block.file or "sweep.yaml")
        path.write_text(block.text, encoding="utf-8")
        sweep = load_sweep(str(path))
        configs = TrialConfigs(sweep.base, [], sweep.name or "")
        assert [configs.config_of(trial) for trial in list_trials(sweep)]


def test_mbpp_lines_write_the_files_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [each for each in blocks("python") if "google-research-datasets/mbpp" in each.text]
    assert block.source == "docs/rewards-and-grading.md"
    row = {"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}
    hub = SimpleNamespace(load_dataset=lambda name, config, split: [{**row, "split": split}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.source, "exec"), {})
    _, heldout = open_splits(load_config(example_path("mbpp-code")))
    [problem] = heldout["heldout"].read()
    assert problem.columns["split"] == "test" and problem.columns["tests"] == row["test_list"]
    assert json.loads((tmp_path / "mbpp-train.jsonl").read_text())["split"] == "train"


def test_hub_files_has_every_dataset_on_the_hub() -> None:
    assert set(HUB_FILES) == set(DATASETS) - set(EMBEDDED)


@dataclass(frozen=True)
class Workplace:
    """Folder of a reader who has written the blocks of a page into files, and has data where the config names it."""

    folder: Path

    def load(self, block: Block) -> Config:
        """Write a config to a file, load it, and make up the data and the modules that it names."""
        path = self.folder / "my_run.yaml"
        path.write_text(block.text, encoding="utf-8")
        config = load_config(path)
        for name in named_datasets(block):
            self._write_problems(name, config)
        for reference in own_references(config):
            self._write_module(reference, block.source)
        return config

    def load_stages(self, block: Block) -> Stages:
        """Write a YAML with stages to a file, load it, and make up the data that it names."""
        path = self.folder / "my_run.yaml"
        path.write_text(block.text, encoding="utf-8")
        stages = load_stages(path)
        for stage in stages:
            data = stage.config.data
            for name in (*train_paths(data.train), data.heldout):
                if isinstance(name, str):
                    self._write_problems(os.path.relpath(name) if name.startswith("/") else name, stage.config)
        return stages

    def _write_problems(self, name: str, config: Config) -> None:
        """Write a file of problems at the place where a dataset is read from, if that is not embedded."""
        if name in EMBEDDED:
            return
        if name in HUB_FILES or (name.count("/") == 1 and "." not in name and "://" not in name):
            folder = HUB_FILES.get(name, f"hf://datasets/{name}/data")
            addresses = [f"{folder}/{split}-00000-of-00001.parquet" for split in HUB_SPLITS.values()]
        else:
            addresses = [name.replace("*", "a")]
        # A worked solution of GSM8K, and text, are read as solutions too.
        names = gsm8k.COLUMNS if name == "gsm8k" else {}
        names = {"prompt": "prompt", "solution": "solution"} | names | dict(config.data.columns)
        if config.run.kind == "sft":
            names = {"prompt": "prompt", "completion": "completion"} | dict(config.data.columns)
        row = {column: "What is 1 + 1? #### 2" for column in names.values()}
        row |= {column: "assert True" for ours, column in names.items() if ours in ("tests", "setup")}
        for address in addresses:
            path = self.folder / re.sub(r"^(\w+)://", r"\1/", address)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                pq.write_table(pa.Table.from_pylist([row]), path)
            else:
                assert path.suffix == ".jsonl", f"{name}: this test makes up parquet and jsonl files"
                path.write_text(json.dumps(row) + "\n", encoding="utf-8")

    def _write_module(self, reference: str, source: str) -> None:
        """Write the Python block of a page that defines `package.module:name` to that module."""
        module, _, name = reference.partition(":")
        defining = [
            block
            for block in blocks("python")
            if block.source == source and name in top_level_names(ast.parse(block.text))
        ]
        assert len(defining) == 1, f"{source}: the YAML names {reference}, but {len(defining)} Python blocks define it"
        assert defining[0].file in ("", f"{module}.py"), f"{source}: {reference} is defined in {defining[0].file}"
        path = self.folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(defining[0].text, encoding="utf-8")


def named_datasets(block: Block) -> list[str]:
    """Return the datasets that a YAML names, without its defaults."""
    data = yaml.safe_load(block.text).get("data", {})
    heldout = data.get("heldout")
    sets = list(heldout.values()) if isinstance(heldout, dict) else [heldout]
    return [name for name in (*train_paths(data.get("train")), *sets) if name is not None]


def own_references(config: Config) -> list[str]:
    """Return the functions and classes of the user that a config names as `package.module:name`."""
    rollout = config.rollout
    names = [*config.rewards.functions, *rollout.tools, *rollout.environments.values(), *rollout.settings]
    names += [] if rollout.function is None else [rollout.function]
    return sorted({name for name in names if ":" in name and not name.startswith("grpo_ray.")})


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    with stores_on_disk(tmp_path):
        yield Workplace(tmp_path)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_config_loads_and_reads_its_problems(block: Block, workplace: Workplace) -> None:
    config = workplace.load(block)
    if "heldout" not in (yaml.safe_load(block.text).get("data") or {}):  # figures are of the data that it trains on
        assert {source.dataset for source in config.heldout_sources.values()} == set(train_paths(config.data.train))
    train, heldout = open_splits(config)
    for split in (*train.values(), *heldout.values()):
        problem = next(iter(split.shards[0].read()))
        assert problem.prompt[-1]["role"] == "user"
        assert problem.solution or not config.needs_solutions_of(problem.source)
    assert load_rewards(config.rewards)
    assert load_definition(config.rollout).environments.keys() == config.rollout.environments.keys()
    if config.rollout.function is not None:
        load_rollout_function(config.rollout)


@pytest.mark.parametrize("block", STAGES, ids=str)
def test_stages_load_and_read_their_problems(block: Block, workplace: Workplace) -> None:
    for stage in workplace.load_stages(block):
        train, heldout = open_splits(stage.config)
        for split in (*train.values(), *heldout.values()):
            assert next(iter(split.shards[0].read())).prompt[-1]["role"] == "user"


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_checkpoint_of_a_config_can_be_evaluated(block: Block, workplace: Workplace) -> None:
    """The command that the summary prints, with its options, loads what the run folder recorded."""
    config = workplace.load(block)
    recorded = yaml.safe_load(yaml.safe_dump(config.to_dict()))
    evaluated = from_mapping(
        evaluation_settings(recorded, data_is_given=False, trusts_tools=True, trusts_engine=False, trusts_rewards=True)
    )
    if any(source.is_part_of_training for source in config.heldout_sources.values()):
        assert evaluated.data.train == config.data.train
    assert evaluated.heldout_sources == config.heldout_sources


# --- Python ---


def module_file(name: str) -> Path | None:
    """Return the file of a module of ours, or None if there is none."""
    path = ROOT.joinpath(*name.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def missing_names(code: str) -> list[str]:
    """Return the modules and names that a code imports from grpo_ray and that do not exist; nothing is imported."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            missing += [each.name for each in node.names if is_missing(each.name)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            missing += [f"{node.module}.{each.name}" for each in node.names if is_missing(node.module, each.name)]
    return missing


def is_missing(module: str, name: str | None = None) -> bool:
    """Return True if a module of ours, or a name in it, does not exist."""
    if module.partition(".")[0] != "grpo_ray":
        return False
    path = module_file(module)
    if path is None:
        return True
    if name is None or module_file(f"{module}.{name}"):
        return False
    if module == "grpo_ray":
        return name not in grpo_ray.__all__
    return name not in top_level_names(ast.parse(path.read_text(encoding="utf-8")))


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or assigns at its top level; what it only imports is not its own."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


@pytest.mark.parametrize("block", [*blocks("python"), *blocks("code"), *blocks("span")], ids=str)
def test_python_compiles_and_its_imports_exist(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert missing_names(block.text) == []


def test_missing_import_is_found() -> None:
    code = "from grpo_ray import train, learn\nfrom grpo_ray.errors import DataError, Oops\nimport grpo_ray.nothing"
    assert missing_names(code) == ["grpo_ray.learn", "grpo_ray.errors.Oops", "grpo_ray.nothing"]


# --- Commands ---


def check_command(command: Command) -> None:
    """Check a command of ours, also within one of another program.

    Raises:
        AssertionError, ConfigError, SystemExit: it is not valid.
    """
    words = list(command.words)
    program = Path(words[0]).name
    if program == "make":
        check_make(words[1:])
    elif program == "python":
        check_python(words[1:], command.source)
    elif program == "grpo-ray":
        check_grpo_ray(words[1:], command.source)
    else:
        assert program in OTHER_PROGRAMS, f"{program} is no program of OTHER_PROGRAMS"
        inner = next((at for at, word in enumerate(words) if Path(word).name in ("grpo-ray", "python")), None)
        for word in words[1:inner]:
            assert not word.startswith(("jobs/", "cluster.yaml")) or (ROOT / word).is_file(), f"{word} does not exist"
        if inner is not None:
            check_command(Command(command.source, tuple(words[inner:])))


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        variable, is_variable, _ = word.partition("=")
        if is_variable:
            assert f"$({variable})" in makefile or f"$(if $({variable})" in makefile, f"Makefile reads no {variable}"
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"Makefile has no target {word}"


def check_python(words: Sequence[str], source: str) -> None:
    """Check the module or script of `python ...`, its options, and the command after `--`."""
    if words[0] == "-m":
        name = words[1]
        assert module_file(name) or name in {"build", "pytest", "venv"}, f"no module {name}"
        return
    script, arguments = words[0], list(words[1:])
    path = ROOT / script
    assert path.is_file(), f"{script} does not exist"
    if script in JOB_COMMANDS:
        check_grpo_ray([JOB_COMMANDS[script], *arguments], source)
        return
    if "--" in arguments:
        end = arguments.index("--")
        check_command(Command(source, tuple(arguments[end + 1 :])))
        arguments = arguments[:end]
    known = re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8"))
    assert [word for word in arguments if word.startswith("--") and word not in known] == []


def check_grpo_ray(words: Sequence[str], source: str) -> None:
    """Parse the arguments, and load the config with the overrides."""
    if len(words) == 1 and words[0] in subcommands():  # named in running text
        return
    arguments = build_parser().parse_args([word for word in words if word != "section.field=value"])
    sort_overrides(arguments)
    config = getattr(arguments, "config", None)
    if config in PLACEHOLDERS:
        config = None
    text = reader_files().get(config) if config else None
    assert config is None or text is not None or (ROOT / config).is_file(), f"{config} does not exist"
    if config is not None and text is None and has_stages_of(config):
        load_stages(config, getattr(arguments, "overrides", ()))
        return
    load_config(config, getattr(arguments, "overrides", ()), text=text)


def subcommands() -> set[str]:
    (commands,) = [action for action in build_parser()._subparsers._group_actions]  # type: ignore[union-attr]
    choices: Any = commands.choices
    return set(choices)


def reader_files() -> dict[str, str]:
    """Return the YAML blocks that begin with the name of a file of the reader's own."""
    return {block.file: block.text for block in blocks("yaml") if block.file}


@pytest.mark.parametrize("command", sorted(set(commands()), key=str), ids=str)
def test_command_is_valid(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    try:
        check_command(command)
    except SystemExit as ended:
        assert ended.code == 0, f"{command}: is refused by the parser"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make test-nothing", "no target test-nothing"),
        ("make test-gpu WET=1", "reads no WET"),
        ("grpo-ray fly", None),
        ("grpo-ray train --example arithmetic --fast", None),
        ("grpo-ray train missing.yaml", "missing.yaml"),
        ("grpo-ray train --example missing", "no such example"),
        ("grpo-ray train jobs/configs/arithmetic.yaml grpo.max_stepz=3", "max_stepz"),
        ("python jobs/train.py --example arithmetic grpo.max_steps=-1", "max_steps"),
        ("ray job submit -- python jobs/nothing.py", "jobs/nothing.py"),
        ("python -m grpo_ray.nothing", "grpo_ray.nothing"),
        ("python tests/helpers/replay.py RUN --sped 10", "--sped"),
        ("grporay train", "grporay"),
    ],
)
def test_invalid_command_is_found(line: str, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, SystemExit, ValueError), match=message):
        check_command(Command("README.md", tuple(line.split())))


def test_commands_of_every_kind_are_found() -> None:
    programs = {Path(each.words[0]).name for each in commands()}
    assert {"grpo-ray", "make", "python", "ray"} <= programs
    assert {each.source.partition("/")[0] for each in commands()} >= {"README.md", "docs", "notebooks", "jobs"}
