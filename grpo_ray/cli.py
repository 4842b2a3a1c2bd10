"""The command line: `grpo-ray train | check | eval | chaos | export | report`."""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.config import loader
from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError, GrpoRayError, TrainingError
from grpo_ray.storage.retry import is_full, is_transient

if TYPE_CHECKING:
    from grpo_ray.resilience.chaos import FaultOutcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Gives 0 if all went well, 2 for what the user can mend, 1 for a failure in the workers."""
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except TrainingError as error:
        print(f"grpo-ray: {error}", file=sys.stderr)
        return 1
    except GrpoRayError as error:
        for line in str(error).splitlines():
            print(f"grpo-ray: {line}", file=sys.stderr)
        return 2
    except OSError as error:
        if not (is_full(error) or is_transient(error)):
            raise
        print(f"grpo-ray: the storage failed: {error}; the same command goes on once it is well", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-ray", description="Post-train a language model with GRPO on verifiable math, on a Ray cluster."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", add_help=False, help="train from a YAML, or go on with a run")
    train.add_argument("config", nargs="?", metavar="CONFIG.yaml")
    train.add_argument("overrides", nargs="*", metavar="section.field=value")
    train.add_argument("-h", "--help", action="store_true")
    train.set_defaults(run=_train)

    breaking = commands.add_parser("chaos", help="train while things break on purpose, and see what is lost")
    breaking.add_argument("config", nargs="?", metavar="CONFIG.yaml")
    breaking.add_argument("overrides", nargs="*", metavar="section.field=value")
    breaking.add_argument("--seed", type=int, default=0, help="decides when and where each fault strikes")
    breaking.add_argument(
        "--faults", metavar="A,B,...", help="which ones; default: one of each kind. A hang lasts run.hang_seconds"
    )
    breaking.set_defaults(run=_chaos)

    checking = commands.add_parser("check", help="look at data, rewards and memory before money is spent")
    checking.add_argument("config", metavar="CONFIG.yaml")
    checking.add_argument("--sample", type=int, metavar="N", help="hold about N solutions against themselves, not all")
    checking.add_argument("--json", metavar="FILE", help="write the report there too")
    checking.add_argument("overrides", nargs="*", metavar="section.field=value")
    checking.set_defaults(run=_check)

    evaluation = commands.add_parser("eval", help="measure a checkpoint: pass@1, pass@k, maj@k")
    evaluation.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, URI or hub id")
    evaluation.add_argument("--data", help="problems to measure with; default: the config's held-out ones")
    evaluation.add_argument("--num-samples", type=int, default=1, metavar="K", help="completions of each problem")
    evaluation.add_argument("--config", metavar="CONFIG.yaml", help="default: the config.yaml of the run's folder")
    evaluation.add_argument("--json", metavar="FILE", help="write the result there too")
    evaluation.add_argument("overrides", nargs="*", metavar="section.field=value")
    evaluation.set_defaults(run=_eval)

    exporting = commands.add_parser("export", help="write a checkpoint's policy as a plain Hugging Face folder")
    exporting.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or URI; of a run folder, its best one")
    exporting.add_argument("folder", metavar="FOLDER", help="made by the command, on this machine")
    exporting.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it was saved")
    exporting.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    exporting.set_defaults(run=_export)

    reporting = commands.add_parser("report", help="make a run into one HTML page")
    reporting.add_argument("runs", nargs="+", metavar="RUN", help="run folder or URI; several are overlaid")
    reporting.add_argument("--out", metavar="FILE.html", help="default: report.html in the run folder")
    reporting.set_defaults(run=_report)
    return parser


def _train(chosen: argparse.Namespace) -> int:
    if chosen.help:
        print(train_help())
        return 0
    config = _load(chosen)
    from grpo_ray.driver.run import train

    summary = train(config)
    print_summary(summary)
    if summary.stopped:
        print(f"stopped after step {summary.steps} by {summary.stopped}; the same command goes on from there")
        return 128 + signal.Signals[summary.stopped]  # as a shell reports it
    return 0


def _load(chosen: argparse.Namespace) -> Config:
    """The config of a command line in which the file may be left out."""
    path, overrides = chosen.config, list(chosen.overrides)
    if path is not None and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    return loader.load_config(path, overrides)


def _chaos(chosen: argparse.Namespace) -> int:
    config = _load(chosen)
    from grpo_ray.driver.run import train
    from grpo_ray.resilience import chaos
    from grpo_ray.storage.run_folder import RunFolder

    kinds = chosen.faults.split(",") if chosen.faults else list(chaos.KINDS)
    grpo, cluster = config.grpo, config.cluster
    faults = chaos.plan_faults(chosen.seed, kinds, grpo.max_steps, grpo.save_steps, cluster.max_workers)
    # A run of its own, so that a real one of that name is left alone; and allowed to fail as often as it will.
    run = replace(config.run, name=f"{config.run.name}-chaos-{chosen.seed}", max_failures=2 * len(faults))
    config = replace(config, run=run)
    folder = RunFolder(run.storage_path, run.name, run.storage_patience)
    if folder.exists():
        raise ConfigError(f"{folder.uri} exists: faults strike once in the life of a run; give another --seed")
    print_summary(train(config, faults=faults))
    missing, doubled = chaos.count_lost_and_repeated(folder, grpo.max_steps, grpo.prompts_per_step)
    print_findings(chaos.fault_outcomes(folder, faults), missing, doubled)
    return 0 if not missing and not doubled else 1


def _check(chosen: argparse.Namespace) -> int:
    config = loader.load_config(chosen.config, chosen.overrides)
    from grpo_ray.driver import preflight
    from grpo_ray.driver.audit import audit, print_report
    from grpo_ray.driver.progress import ProgressLine
    from grpo_ray.driver.run import UNVERIFIABLE, connect
    from grpo_ray.storage.run_folder import RunFolder

    folder = RunFolder(config.run.storage_path, config.run.name)
    with ProgressLine(config.grpo.max_steps) as line:
        preflight.check_trl(config)
        folder.check_writable()
        connect(config)
        report = audit(config, sample=chosen.sample, say=line.phase)
    print_report(report)
    folder.write_json(report.unverifiable_ids, UNVERIFIABLE)
    if report.unverifiable_ids:
        print(f"{len(report.unverifiable_ids)} problems will be left out of this run: {folder.uri_of(UNVERIFIABLE)}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 0


def _eval(chosen: argparse.Namespace) -> int:
    if chosen.num_samples < 1:
        raise ConfigError(f"--num-samples {chosen.num_samples} must be at least 1")
    path, text = (chosen.config, None) if chosen.config else _config_beside(chosen.checkpoint)
    config = loader.load_config(path, chosen.overrides, drop=("versions",), text=text)
    if chosen.data:
        config = replace(config, data=replace(config.data, heldout=chosen.data))
    from grpo_ray.data.stream import build_index, open_splits
    from grpo_ray.driver import preflight
    from grpo_ray.driver.progress import ProgressLine
    from grpo_ray.driver.run import connect
    from grpo_ray.evaluation.evaluate import evaluate

    with ProgressLine(config.grpo.max_steps) as line:
        connect(config)
        preflight.check_cluster(config)
        _, heldout = open_splits(config)
        build_index(heldout)
        result = evaluate(config, chosen.checkpoint, heldout, num_samples=chosen.num_samples, say=line.phase)
    print_evaluation(result)
    text = json.dumps(result.to_dict(), indent=2)
    if chosen.json:
        Path(chosen.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


def _export(chosen: argparse.Namespace) -> int:
    from grpo_ray.driver.export import export

    target = Path(chosen.folder).expanduser()
    exported = export(
        chosen.checkpoint, target, dtype=chosen.dtype, trust_remote_code=chosen.trust_remote_code, say=print
    )
    print(f"{target} holds the policy of {exported}")
    return 0


def _report(chosen: argparse.Namespace) -> int:
    from grpo_ray import report

    print(report.write_page(chosen.runs, chosen.out))
    return 0


def _config_beside(checkpoint: str) -> tuple[str | None, str | None]:
    """Place and text of the config of the run that a checkpoint lies in; None and None if it lies in none."""
    from grpo_ray.storage.run_folder import RunFolder, split_path

    path = checkpoint if "://" in checkpoint else os.path.abspath(os.path.expanduser(checkpoint))
    run = RunFolder(*split_path(split_path(path)[0]))
    if not run.exists("config.yaml"):
        return None, None
    return run.uri_of("config.yaml"), run.read_text("config.yaml")


def train_help() -> str:
    """Every field of the YAML with its meaning and default; TRL's own fields at the end."""
    goodput_rows = [
        "usage: grpo-ray train [CONFIG.yaml] [section.field=value ...]",
        "",
        "Trains from a YAML, or goes on with the run of that name. Every field can be set in the YAML or behind it:",
    ]
    for section, fields in loader.describe_fields().items():
        goodput_rows.append(f"\n{section}:")
        for name, (default, text) in fields.items():
            shown = json.dumps(default, default=lambda value: dict(value) if hasattr(value, "keys") else list(value))
            goodput_rows.append(f"  {section}.{name}={shown}\n      {text}")
    from grpo_ray.training.trl_config import trl_fields

    goodput_rows.append("\ngrpo, in TRL's own words:")
    goodput_rows += [f"  grpo.{name}\n      {text}" for name, text in trl_fields().items()]
    return "\n".join(goodput_rows)


def print_summary(summary: object) -> None:
    """The table that a run closes with."""
    from rich.console import Console
    from rich.table import Table

    from grpo_ray.driver.summary import RunSummary, phase_breakdown
    from grpo_ray.telemetry.goodput import goodput_rows

    assert isinstance(summary, RunSummary)
    table = Table(show_header=False, title="run", title_justify="left")

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    of = f"  (greedy, {summary.heldout_problems} problems)"
    table.add_row("held-out before", share(summary.heldout_before) + of)
    table.add_row("held-out after", share(summary.heldout_after) + of)
    table.add_row("reward", f"{share(summary.reward_first)} -> {share(summary.reward_last)}")
    table.add_row("steps", f"{summary.steps} in {summary.train_seconds:.0f} s of training")
    table.add_row("where the time went", phase_breakdown(summary.phase_seconds))
    table.add_row("completions per second", f"{summary.completions_per_second:.1f}")
    table.add_row("wall time", f"{summary.wall_seconds:.0f} s")
    table.add_row("best checkpoint", summary.best_checkpoint or "-")
    table.add_row("latest checkpoint", summary.latest_checkpoint or "-")
    if summary.best_checkpoint:
        table.add_row("look further", f"{_own_name()} eval {summary.best_checkpoint} --num-samples 8")
    for name, value in goodput_rows(summary.price) if summary.price else ():
        table.add_row(name, value)
    console = Console()
    # A path broken over two lines cannot be copied; off a terminal nothing limits the width.
    console.width = max(console.width, 160) if not console.is_terminal else console.width
    console.print(table, highlight=False)


def print_findings(findings: Sequence["FaultOutcome"], missing: int, doubled: int) -> None:
    """What broke in a run on purpose, and what came of it."""
    from rich.console import Console
    from rich.table import Table

    from grpo_ray.resilience.chaos import KINDS

    table = Table(title="faults", title_justify="left")
    for column in ("step", "worker", "what happened", "came of it"):
        table.add_column(column)
    for found in findings:
        came = "did not come to strike"
        if found.struck:
            came = (
                "training again after " + f"{found.seconds:.1f} s" if found.seconds is not None else "training went on"
            )
        table.add_row(str(found.fault.step), str(found.fault.rank), KINDS[found.fault.kind], came)
    Console().print(table, highlight=False)
    lost = "nothing was lost" if not missing else f"{missing} groups are missing from the run's steps"
    print(f"{lost}; {doubled or 'no'} problems were used twice in an epoch")


def _own_name() -> str:
    """How this command can be called from where the user is: by name, or by the path of its environment."""
    beside = Path(sys.executable).with_name("grpo-ray")
    return "grpo-ray" if shutil.which("grpo-ray") or not beside.exists() else os.path.relpath(beside)


def print_evaluation(result: object) -> None:
    """An evaluation as a table."""
    from rich.console import Console
    from rich.table import Table

    from grpo_ray.evaluation.metrics import Evaluation

    assert isinstance(result, Evaluation)
    table = Table(title=f"{result.problems} problems, {result.num_samples} completions each", title_justify="left")
    for column in ("measure", "value", "95 % interval"):
        table.add_column(column)
    measures = {"pass@1": result.pass_at_1}
    if result.num_samples > 1:
        measures |= {f"pass@{result.num_samples}": result.pass_at_k, f"maj@{result.num_samples}": result.maj_at_k}
    for name, estimate in measures.items():
        table.add_row(name, f"{estimate.value:.3f}", f"{estimate.low:.3f} to {estimate.high:.3f}")
    table.add_row("truncated", f"{result.truncated_share:.3f}", "")
    table.add_row("unscorable problems", str(result.unscorable), "")
    Console().print(table, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
