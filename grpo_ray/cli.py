"""Command line of grpo_ray: `build_parser` lists the commands.

Each command is one function that takes the parsed arguments and returns the exit status. Heavy libraries are imported
inside the commands, after the config was read, so that mistakes in it are reported at once.
"""

import argparse
import errno
import importlib
import json
import os
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from grpo_ray import __version__
from grpo_ray.config import loader
from grpo_ray.config.absolute_paths import absolute_model
from grpo_ray.config.benchmarks import BENCHMARKS, parse_suite
from grpo_ray.config.heldout_keys import heldout_label, split_name
from grpo_ray.config.reward_names import REWARD_SCORES, VERDICTS
from grpo_ray.config.schema import Config, DataConfig, RolloutConfig, RunConfig
from grpo_ray.config.similar_names import suggestion
from grpo_ray.config.sources import CHECKPOINT_PREFIX
from grpo_ray.config.trl_fields import PASSED, allowed_values, default_text, meaning
from grpo_ray.driver.stage_config import Stages, has_stages, load_stages
from grpo_ray.errors import ConfigError, DamagedFileError, GrpoRayError, HubError, TrainingError
from grpo_ray.examples import FIRST_REWARD, describe_examples, example_path, write_first_files
from grpo_ray.resilience.error_triage import MEMORY_ADVICE, is_memory_kill
from grpo_ray.storage.numbers import json_values
from grpo_ray.storage.retry import is_full, is_transient
from grpo_ray.text.redaction import redact, redact_stream

if TYPE_CHECKING:
    from grpo_ray.driver.summary import RunSummary
    from grpo_ray.models.memory import ModelShape
    from grpo_ray.storage.run_folder import RunFolder

OVERRIDE = "section.field=value"
CONFIG = "CONFIG.yaml"

STOPPED_BY_WARNING = 3
"""Exit status of a run that a warning in `run.stop_on` has ended."""
FOUND = 4
"""Exit status of `contains` if a problem was used, and of `replay` if the step differs."""
NOT_KNOWN = 5
"""Exit status of `contains` if no problem is known to be used, and of some it is not known."""
SECONDS_OF_ATTACK = 120.0
"""Default of `check --seconds`."""
UNUSABLE_PATH = (errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)
"""Error numbers of files and folders that the user may not read or write, or that cannot exist."""
CHAOS_HANG_SECONDS = 60.0
"""Default of `run.hang_seconds` under `chaos`: the run waits that long for an injected hang to be noticed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: success; 1: failure of the workers, the storage or the hub; 2: mistake that the user can correct; 3: stopped
        by a warning in `run.stop_on`; 4: `contains` found a used problem, or `replay` a difference; 5: for `contains`
        it is not known; 128 + signal number: stopped by a signal, as a shell reports it.
    """
    for stream in (sys.stdout, sys.stderr):  # also covers library messages and the traceback of an unexpected error
        redact_stream(stream)
    try:
        arguments = build_parser().parse_args(argv)
        sort_overrides(arguments)
        return arguments.run(arguments)
    except (TrainingError, HubError) as error:
        print(f"grpo-ray: {error}", file=sys.stderr)
        return 1
    except GrpoRayError as error:
        for line in str(error).splitlines():
            print(f"grpo-ray: {line}", file=sys.stderr)
        return 2
    except Exception as error:  # of any library; all are raised again, except for causes with known advice
        if isinstance(error, BrokenPipeError) and _has_lost_reader(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
            return 128 + signal.SIGPIPE
        if is_memory_kill(error):
            print(f"grpo-ray: a process of Ray died: {MEMORY_ADVICE}", file=sys.stderr)
            return 1
        if isinstance(error, OSError) and error.errno in UNUSABLE_PATH and _is_opened_by_us(error):
            print(f"grpo-ray: {error}; check the permissions, or name another file or folder", file=sys.stderr)
            return 2
        if not isinstance(error, OSError) or not (is_full(error) or is_transient(error)):
            raise
        print(
            f"grpo-ray: the storage failed: {error}; once it works again, run the same command to continue",
            file=sys.stderr,
        )
        return 1


def _has_lost_reader(stream: TextIO) -> bool:
    """Return True if a stream is a pipe whose reader, such as `head`, has ended."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are reported in any case
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_opened_by_us(error: OSError) -> bool:
    """Return True if an error is about a file that this package opened: one that the user named, or one of the run.

    Where another library opened the file, such as one of its cache, the traceback has to show which library that was.
    """
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [module.partition(".")[0] for module in modules]
    # Python's own modules and pyarrow open files for their caller.
    opener = next(each for each in reversed(packages) if each not in (*sys.stdlib_module_names, "pyarrow"))
    return opener in ("grpo_ray", "__main__")  # the latter is this module, run by `python -m`


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, whose options, files and overrides may be in any order."""

    _is_parsing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with `parse_known_intermixed_args`, which calls this method again for its two passes."""
        if self._is_parsing:
            return super().parse_known_args(args, namespace)
        self._is_parsing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_parsing = False


class ExampleAction(argparse.Action):
    """Option `--example NAME`; the name `help` lists all examples and ends the command."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values == "help":
            print(describe_examples())
            parser.exit()
        setattr(namespace, self.dest, values)


def add_example(parser: argparse.ArgumentParser) -> None:
    """Add the option `--example` to a command."""
    parser.add_argument(
        "--example",
        action=ExampleAction,
        metavar="NAME",
        help="use a config that comes with the package; `--example help` lists them",
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; each sets `run` to its function."""
    parser = argparse.ArgumentParser(
        prog="grpo-ray", description="Post-train a language model with GRPO on verifiable math, on a Ray cluster."
    )
    parser.add_argument("--version", action="version", version=f"grpo-ray {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)

    init = commands.add_parser("init", help="write a first YAML, ready to train")
    init.add_argument(
        "target",
        nargs="?",
        default=".",
        metavar="FOLDER|FILE.yaml",
        help="folder that gets my_run.yaml and my_rewards.py, or the YAML's own path; default: this folder",
    )
    add_example(init)
    init.set_defaults(run=run_init)

    train = commands.add_parser("train", add_help=False, help="train from a YAML file, or continue a run")
    train.add_argument("config", nargs="?", metavar=CONFIG)
    train.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    add_example(train)
    train.add_argument("-h", "--help", action="store_true")
    train.set_defaults(run=run_train, requires_file=False)

    chaos = commands.add_parser("chaos", help="train with injected faults, and count what is lost")
    chaos.add_argument("config", nargs="?", metavar=CONFIG)
    chaos.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    add_example(chaos)
    chaos.add_argument("--seed", type=int, default=0, help="seed of the steps and workers of the faults")
    chaos.add_argument(
        "--faults",
        metavar="A,B,...",
        help=f"kinds of faults; default: one of each. A hang lasts run.hang_seconds, here {CHAOS_HANG_SECONDS:g} by "
        "default",
    )
    chaos.set_defaults(run=run_chaos, requires_file=False)

    check = commands.add_parser("check", help="check data, rewards and memory without training")
    check.add_argument("config", nargs="?", metavar=CONFIG)
    check.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="verify about N solutions of each split, not all; write no list of problems to leave out",
    )
    check.add_argument(
        "--attack",
        action="store_true",
        help="then train a policy against the rewards for two minutes, and show the completions that pay most",
    )
    check.add_argument("--seconds", type=float, metavar="S", help="time of --attack's training, in place of 120")
    check.add_argument(
        "--forecast",
        action="store_true",
        help="then take some steps without learning, and estimate signal, hours and the smallest visible gain",
    )
    check.add_argument("--steps", type=int, metavar="N", help="steps of --forecast, in place of 4")
    check.add_argument(
        "--price", type=float, metavar="P", help="price of a GPU for an hour, for the cost of --forecast"
    )
    check.add_argument("--json", metavar="FILE", help="also write the report to this file")
    check.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    add_example(check)
    check.set_defaults(run=run_check, requires_file=True)

    evaluate = commands.add_parser("eval", help="measure a checkpoint: pass@1, pass@k, maj@k")
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, URI or hub id")
    problems = evaluate.add_mutually_exclusive_group()
    problems.add_argument("--data", help="problems to measure with; default: the config's held-out sets")
    problems.add_argument(
        "--suite",
        metavar="A,B,...",
        help=f"measure on benchmarks: {', '.join(BENCHMARKS)}; NAME=PATH reads one from other files than the hub's",
    )
    problems.add_argument("--heldout", metavar="NAME", help="measure on one of the named held-out sets only")
    evaluate.add_argument(
        "--num-samples",
        type=int,
        metavar="K",
        help="completions per problem; default: heldout.num_samples. Several are sampled at heldout.temperature, or at "
        "grpo.temperature if that is 0",
    )
    evaluate.add_argument("--config", metavar=CONFIG, help="default: config.yaml of the checkpoint's run folder")
    evaluate.add_argument("--json", metavar="FILE", help="write the result to this file instead of the output")
    evaluate.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    evaluate.add_argument(
        "--trust-tools",
        action="store_true",
        help="run the tools, environments and rollout function that the run folder names",
    )
    evaluate.add_argument(
        "--trust-engine", action="store_true", help="pass all of vLLM's arguments that the run folder names"
    )
    evaluate.add_argument(
        "--trust-rewards",
        action="store_true",
        help="run the reward functions that the run folder scores held-out completions with",
    )
    evaluate.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    evaluate.set_defaults(run=run_eval, requires_file=True)

    export = commands.add_parser(
        "export", help="write a checkpoint's policy as a plain Hugging Face folder, and push it"
    )
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or URI; a run folder: its best checkpoint")
    export.add_argument("folder", metavar="FOLDER", help="local folder to create")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the checkpoint")
    export.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    export.add_argument(
        "--push",
        metavar="REPO",
        help="then upload the folder to this model repository of the hub, owner/name; a missing one is created, "
        "private. The token is that of the environment variable HF_TOKEN. The folder may be an earlier export",
    )
    export.add_argument("--public", action="store_true", help="push to a repository that everyone can see")
    export.set_defaults(run=run_export)

    report = commands.add_parser("report", help="write an HTML report of a run")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder or URI; several are overlaid")
    report.add_argument("--out", metavar="FILE.html", help="default: report.html in the run folder")
    report.set_defaults(run=run_report)

    sweep = commands.add_parser(
        "sweep",
        help="train several variants of a config and compare them, or control such a sweep",
        usage=f"grpo-ray sweep FILE.yaml [{OVERRIDE} ...]\n"
        "       grpo-ray sweep stop SWEEP TRIAL\n"
        "       grpo-ray sweep resume SWEEP TRIAL\n"
        f"       grpo-ray sweep clone SWEEP TRIAL [{OVERRIDE} ...]",
    )
    sweep.add_argument(
        "words",
        nargs="+",
        metavar="WORD",
        help="a sweep file and overrides of its base config; or a request to a sweep, by its folder or URI, about one "
        "of its trials: save it and stop it, continue it, or begin a new trial from its latest checkpoint with other "
        "settings",
    )
    sweep.set_defaults(run=run_sweep_command)

    watch = commands.add_parser(
        "watch", help="serve a run's page on this machine, and refresh it while the run goes on"
    )
    watch.add_argument("folder", metavar="RUN", help="run folder or URI")
    watch.add_argument("--port", type=int, default=0, help="port on the loopback interface; default: a free one")
    watch.add_argument("--open", action="store_true", help="open the page in the browser")
    watch.set_defaults(run=run_watch)

    fork = commands.add_parser("fork", help="train a run from one of its checkpoints on, under changed settings")
    fork.add_argument("source", metavar="RUN", help="run folder or URI; it is only read")
    fork.add_argument("--at", type=int, required=True, metavar="STEP", help="step of a kept checkpoint; 0: the start")
    add_settings_options(fork)
    fork.add_argument("--json", metavar="FILE", help="also write the comparison with the run to this file")
    fork.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    fork.set_defaults(run=run_fork, requires_file=True)

    replay = commands.add_parser("replay", help="compute a recorded step again, and compare it bit for bit")
    replay.add_argument("source", metavar="RUN", help="run folder or URI; it is only read")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="step to compute, from 1")
    add_settings_options(replay)
    replay.add_argument("--keep", action="store_true", help="keep the run folder of the replay")
    replay.add_argument("--json", metavar="FILE", help="also write the outcome to this file")
    replay.add_argument("overrides", nargs="*", default=[], metavar=OVERRIDE)
    replay.set_defaults(run=run_replay, requires_file=True)

    contains = commands.add_parser("contains", help="find the problems of a file that a policy was trained on")
    contains.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or URI; a run folder: its best checkpoint")
    contains.add_argument("problems", metavar="PROBLEMS", help="problems, in any form of data.train")
    contains.add_argument(
        "--columns",
        metavar="A=B,...",
        help="columns of the file, as in prompt=question,solution=answer; default: data.columns of the run",
    )
    contains.add_argument("--json", metavar="FILE", help="also write the answer for each problem to this file")
    contains.set_defaults(run=run_contains)
    return parser


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the settings of a run that is trained from its folder."""
    parser.add_argument("--config", metavar=CONFIG, help="settings of the run; default: config.yaml of its folder")
    parser.add_argument(
        "--trust-settings",
        action="store_true",
        help="use settings of the run folder that run its author's code, or call an address",
    )


def run_init(arguments: argparse.Namespace) -> int:
    """Write a first config, or a copy of an example, and print the commands that use it."""
    written = write_first_files(Path(arguments.target).expanduser(), arguments.example)
    for path in written:
        print(f"wrote {path}")
    config, *others = (shlex.quote(str(path)) for path in written)
    print(f"\nchecked by:   grpo-ray check {config}\ntrained by:   grpo-ray train {config}")
    if others:
        print(f"{FIRST_REWARD.name} has a reward of your own, which a comment in the YAML shows how to use")
    return 0


def run_train(arguments: argparse.Namespace) -> int:
    """Train from a config, or continue the run of that name."""
    if arguments.help:
        print(train_help())
        return 0
    if has_stages(arguments.config):
        return run_stages(arguments)
    config = check_names(loader.load_config(arguments.config, arguments.overrides))
    load_libraries(config)
    from grpo_ray.driver.run import train
    from grpo_ray.driver.tables import print_summary

    summary = train(config)
    print_summary(summary)
    return exit_status(summary, config.run.stop_on)


def load_libraries(config: Config, module: str = "grpo_ray.driver.run") -> None:
    """Import a module that needs the libraries of a run, and meanwhile start the run's cluster, if it has none.

    Raises ConfigError.
    """
    print("loading libraries", flush=True)
    from grpo_ray.driver.cluster.connection import start_cluster_while

    start_cluster_while(config, partial(importlib.import_module, module))


def exit_status(summary: "RunSummary", stop_on: Sequence[str]) -> int:
    """Return the exit status of a run, and print why it has stopped before its last step.

    Args:
        stop_on: `run.stop_on`.
    """
    from grpo_ray.driver.summary import PAUSED

    if summary.stopped is None:
        return 0
    if summary.stopped == PAUSED:
        print(
            f"paused after step {summary.steps} (run.pause_at); set a later run.pause_at, or null, and run the same "
            "command to continue"
        )
        return 0
    if summary.stopped in stop_on:
        print(
            f"stopped after step {summary.steps} by the warning {summary.stopped} (run.stop_on); remove the cause, or "
            "the name from run.stop_on, and run the same command to continue"
        )
        return STOPPED_BY_WARNING
    print(f"stopped after step {summary.steps} by {summary.stopped}; run the same command to continue")
    return 128 + signal.Signals[summary.stopped]


def run_stages(arguments: argparse.Namespace) -> int:
    """Run the stages of a YAML one after the other, from the first one that has not ended."""
    stages = load_stages(arguments.config, arguments.overrides)
    check_names_of_stages(stages)
    load_libraries(stages.stages[-1].config, "grpo_ray.driver.stage_runs")  # the last stage is checked first
    from grpo_ray.driver.stage_runs import StageResult, train_stages
    from grpo_ray.driver.tables import print_summary

    def show(result: StageResult) -> None:
        place = f"stage {result.stage.number} of {len(stages)}, {result.stage.name}"
        if result.summary is None:
            print(f"{place}: has ended before", flush=True)
        else:
            print(f"{place}:", flush=True)
            print_summary(result.summary)

    last = train_stages(stages, show)[-1]
    return 0 if last.summary is None else exit_status(last.summary, last.stage.config.run.stop_on)


def run_chaos(arguments: argparse.Namespace) -> int:
    """Train with injected faults. Returns 1 if a group is missing or a problem was used twice in an epoch."""
    config = check_names(load_chaos_config(arguments))
    if config.run.kind == "sft":
        raise ConfigError("chaos injects the faults of a run of GRPO; run.kind=sft is not supported")
    from grpo_ray.resilience.chaos import (
        count_lost_and_repeated,
        describe_plan,
        fault_kinds,
        fault_outcomes,
        plan_faults,
        require_engines,
    )
    from grpo_ray.storage.run_folder import RunFolder

    kinds = arguments.faults.split(",") if arguments.faults else fault_kinds(config.engine.is_dedicated)
    require_engines(kinds, config.engine.is_dedicated)
    grpo = config.grpo
    workers = config.cluster.max_workers
    faults = plan_faults(
        arguments.seed,
        kinds,
        grpo.max_steps,
        grpo.save_steps,
        workers,
        config.steps_per_batch,
        config.rollout.max_staleness,
    )
    # A separate run, so that the run of the configured name stays untouched. Every fault may cost two attempts.
    run = replace(
        config.run,
        name=f"{config.run.name}-chaos-{arguments.seed}",
        max_failures=2 * len(faults),
        pause_at=None,  # faults are drawn from all steps
    )
    folder = RunFolder(run.storage_path, run.name, run.storage_retry_seconds)
    if folder.exists():
        raise ConfigError(f"{folder.uri} exists, and a run gets its faults only once; set another --seed")
    print("\n".join(describe_plan(faults, run.hang_seconds)), flush=True)
    load_libraries(config)
    from grpo_ray.driver.run import train
    from grpo_ray.driver.tables import print_fault_outcomes, print_summary

    print_summary(train(replace(config, run=run), faults=faults))
    groups = grpo.max_steps // config.num_iterations * grpo.prompts_per_step
    missing, repeated = count_lost_and_repeated(folder, grpo.max_steps, groups)
    print_fault_outcomes(fault_outcomes(folder, faults), missing, repeated)
    return 1 if missing or repeated else 0


def run_check(arguments: argparse.Namespace) -> int:
    """Audit data, rewards and memory, and write the ids of unverifiable problems to the run folder."""
    require_options_with_effect(arguments)
    require_writable(arguments.json)
    if has_stages(arguments.config):
        return check_each_stage(arguments)
    return check_config(check_names(loader.load_config(arguments.config, arguments.overrides)), arguments)


def check_each_stage(arguments: argparse.Namespace) -> int:
    """Check all stages of a YAML together, then audit each of them as `check` does."""
    for option in ("attack", "forecast", "json"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option} takes one run, and {arguments.config} has stages; check a file with the settings of one "
                f"stage, or leave --{option} out"
            )
    stages = load_stages(arguments.config, arguments.overrides)
    check_names_of_stages(stages)
    from grpo_ray.driver.stage_runs import check_stages, unfinished_stages

    remaining = unfinished_stages(stages)
    if not remaining:
        print("all stages have ended")
        return 0
    check_stages(remaining)
    for stage in remaining:
        print(f"stage {stage.number} of {len(stages)}, {stage.name}:", flush=True)
        check_config(stage.config, arguments)
    return 0


def check_config(config: Config, arguments: argparse.Namespace) -> int:
    """Audit one run as `check` does; return the exit status."""
    if config.run.kind == "sft" and (arguments.attack or arguments.forecast):
        raise ConfigError("--attack and --forecast try rewards, which run.kind=sft has none of; leave them out")
    from grpo_ray.driver.launch import UNVERIFIABLE_FILE
    from grpo_ray.driver.preflight.audit import audit
    from grpo_ray.driver.preflight.checks import AUDIT_CHECKS, run_preflight
    from grpo_ray.driver.preflight.run_context import RunContext
    from grpo_ray.driver.tables import print_audit
    from grpo_ray.observers.terminal.progress import ProgressLine
    from grpo_ray.storage.lease import RunLease
    from grpo_ray.storage.run_folder import RunFolder

    folder = RunFolder(config.run.storage_path, config.run.name, config.run.storage_retry_seconds)
    folder.require_plain_files()
    with RunLease.acquire(folder, config.run.takeover, print) as lease:
        with ProgressLine(config.grpo.max_steps, name=f"check {config.run.name}") as progress:
            run_preflight(RunContext(config, folder, progress), AUDIT_CHECKS)
            report = audit(config, sample=arguments.sample, on_progress=progress.phase)
        print_audit(report, config)
        lease.confirm()
        complete = arguments.sample is None  # a sample's list would replace that of a complete check
        if complete:
            folder.write_json(report.unverifiable_ids, UNVERIFIABLE_FILE)
    if complete and (count := len(report.unverifiable_ids)):
        print(f"this run will leave out {count} problems: {folder.uri_of(UNVERIFIABLE_FILE)}")
    described = report.to_dict()

    def record(name: str, result: Any) -> None:
        described[name] = result
        if arguments.json:
            write_json(arguments.json, described)

    if arguments.json:
        write_json(arguments.json, described)
    if config.run.kind == "grpo":  # nothing is generated for the steps of fine-tuning
        print_placement(config, report.policy, folder, record)
    if arguments.attack:
        seconds = SECONDS_OF_ATTACK if arguments.seconds is None else arguments.seconds
        stopped = run_attack(config, seconds, report.columns, record)
        if stopped is not None:
            return 128 + signal.Signals[stopped]
    return run_forecast(config, arguments.steps, arguments.price, record) if arguments.forecast else 0


def print_placement(
    config: Config, policy: "ModelShape", folder: "RunFolder", record: Callable[[str, Any], None]
) -> None:
    """Print whether dedicated engines would take more steps, and record it as `run_attack` does.

    Args:
        policy: sizes of the policy.
        folder: run folder; durations and lengths of its latest steps are used, if it has any.
    """
    from grpo_ray.driver.placement_model.advice import advise_placement, recorded_steps

    # The phases of steps during which engines work do not show how long generating takes.
    is_ahead = config.rollout.max_staleness > 0 or config.engine.is_dedicated
    recorded = None if is_ahead else recorded_steps(folder)
    advice = advise_placement(config, policy, recorded)
    if advice is not None:
        print("\n".join(advice.lines()))
        record("placement", advice.to_dict())


def require_options_with_effect(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option of `check` has no effect or no possible value."""
    for option, needed in (("seconds", "attack"), ("steps", "forecast"), ("price", "forecast")):
        if getattr(arguments, option) is not None and not getattr(arguments, needed):
            raise ConfigError(f"--{option} has an effect with --{needed} only; add --{needed}, or leave --{option} out")
    if arguments.seconds is not None and not 1 <= arguments.seconds <= 86_400:
        raise ConfigError(f"--seconds must be between 1 and 86400; got {arguments.seconds:g}")
    if arguments.steps is not None and arguments.steps < 2:
        raise ConfigError(f"--steps must be at least 2, since the first step is slower; got {arguments.steps}")
    if arguments.price is not None and not 0 <= arguments.price < 1e9:
        raise ConfigError(f"--price must be a number from 0 on; got {arguments.price:g}")


def run_attack(
    config: Config, seconds: float, columns: Sequence[str], record: Callable[[str, Any], None]
) -> str | None:
    """Score the probes, train against the rewards, and print both.

    Args:
        columns: columns of the training problems.
        record: called with a name and the result in JSON's types, as soon as there is one.

    Returns:
        Name of the signal that stopped the training; None if none did.
    """
    from grpo_ray.driver.attack import plan_attack, probe_rewards, train_against
    from grpo_ray.driver.tables import print_attack, print_probes

    planned = plan_attack(config)  # raises ConfigError before any work is done
    probes = probe_rewards(config, columns)
    print_probes(probes)
    record("probes", [each.to_dict() for each in probes])
    result = train_against(config, planned, seconds)
    print_attack(result)
    record("attack", result.to_dict())
    return result.stopped


def run_forecast(config: Config, steps: int | None, price: float | None, record: Callable[[str, Any], None]) -> int:
    """Forecast the run, print the result and record it as `run_attack` does; return the exit status."""
    from grpo_ray.driver.forecast import STEPS, forecast
    from grpo_ray.driver.tables import print_forecast
    from grpo_ray.driver.trial import StoppedTrialError

    try:
        result = forecast(config, STEPS if steps is None else steps, price)
    except StoppedTrialError as error:
        print(f"grpo-ray: {error}", file=sys.stderr)
        return 128 + signal.Signals[error.signal]
    print_forecast(result, config)
    record("forecast", result.to_dict())
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure a checkpoint on held-out problems."""
    require_writable(arguments.json)
    checkpoint = absolute_model(arguments.checkpoint)  # tasks of the cluster have other working folders
    config = load_eval_config(arguments)
    require_checkpoint(checkpoint)
    from grpo_ray.driver.preflight.names import check_scoring_and_turns

    check_scoring_and_turns(config)
    from grpo_ray.data.registry import require_local_files

    require_local_files(config)
    from grpo_ray.data.stream import build_index, open_splits
    from grpo_ray.driver.cluster.connection import connect, require_engine_system, require_evaluation_resources
    from grpo_ray.driver.preflight.overlong import evaluated_policy, leave_out_overlong
    from grpo_ray.driver.tables import print_evaluation
    from grpo_ray.evaluation.evaluate import evaluate
    from grpo_ray.observers.terminal.progress import ProgressLine
    from grpo_ray.rewards.registry import needs_solutions

    with ProgressLine(config.grpo.max_steps, name="eval") as progress:
        for line in connect(config):
            progress.notice(line)
        if notice := require_evaluation_resources(config):
            progress.notice(notice)
        require_engine_system(config)
        _, heldout = open_splits(config, partial(needs_solutions, config))
        if arguments.heldout:  # leave out the sets of a mixture's other sources
            heldout = {key: split for key, split in heldout.items() if heldout_label(key) == arguments.heldout}
        policy = evaluated_policy(config, checkpoint)
        limits_template = not config.model.trust_remote_code  # limits are pointless if the model's own code may run
        filtered = {
            key: leave_out_overlong(
                config,
                split_name(key),
                build_index(split),
                folder=None,
                policy_path=policy,
                limits_template=limits_template,
            )
            for key, split in heldout.items()
        }
        for each in filtered.values():
            if each.notice:
                progress.notice(each.notice)
        splits = {key: each.index.split for key, each in filtered.items()}
        results = evaluate(config, checkpoint, splits, limits_template=limits_template, on_progress=progress.phase)
    for key, result in results.items():
        print_evaluation(
            result, heldout_label(key), is_verdict=config.heldout_score_of(config.source_of(key)) in VERDICTS
        )
    # Named sets are written by name, even if there is only one; a single unnamed set is written without a key.
    described = {heldout_label(key): result.to_dict() for key, result in results.items()}
    described = described.get("", described)
    if arguments.json:
        write_json(arguments.json, described)
    else:
        print(to_json(described), end="")
    return 0


def require_checkpoint(path: str) -> None:
    """Refuse a local checkpoint that does not exist, or is a run folder; others are read later. Raises ConfigError.

    Args:
        path: local folder, absolute if it exists; URI; or id of the hub.
    """
    if "://" in path or not (os.path.isabs(path) or path.count("/") > 1):  # an id of the hub has at most one slash
        return
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: there is no such checkpoint")
    if not any(os.path.isfile(f"{path}/{name}") for name in ("config.json", "adapter_config.json")):
        checkpoints = sorted(each.name for each in Path(path).glob(f"{CHECKPOINT_PREFIX}*"))
        mend = f"; it is a run folder: name a checkpoint, such as {path}/{checkpoints[-1]}" if checkpoints else ""
        raise ConfigError(f"{path}: is no checkpoint, since it has neither config.json nor adapter_config.json{mend}")


def run_export(arguments: argparse.Namespace) -> int:
    """Write the policy of a checkpoint as a plain Hugging Face folder, and push it to the hub with `--push`."""
    from grpo_ray.export.checkpoint import export, find_checkpoint, has_export, read_origin
    from grpo_ray.export.hub import Hub, token_from_environment

    if arguments.public and not arguments.push:
        raise ConfigError("--public has an effect with --push REPO only; add --push, or leave --public out")
    target = Path(arguments.folder).expanduser()
    hub = Hub(token_from_environment()) if arguments.push else None
    if hub:
        # Before the export, which may take long, and before a repository is created for nothing.
        has_export(target, find_checkpoint(arguments.checkpoint), arguments.dtype)
        repo = hub.open_repo(arguments.push, arguments.public)
    exported = export(
        arguments.checkpoint,
        target,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
        reuse=hub is not None,
        on_progress=print,
    )
    print(f"the policy of {exported} is in {target}")
    if hub:
        origin = read_origin(target)
        address = hub.upload(target, repo, f"{origin['checkpoint']} of the run {origin['run']}, exported by grpo_ray")
        print(f"pushed to {address} ({repo.visibility})")
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write the HTML report of one or several runs, and print its path."""
    from grpo_ray.pages.report import write_page

    print(write_page(arguments.runs, arguments.out))
    return 0


def run_sweep_command(arguments: argparse.Namespace) -> int:
    """Run a sweep, or write a request to one. Returns 1 if a trial failed."""
    words: list[str] = arguments.words
    if words[0] in ("stop", "resume", "clone") and not os.path.exists(words[0]):
        return request_of_sweep(words[0], words[1:])
    files = [word for word in words if not is_override(word)]
    if len(files) != 1:
        raise ConfigError(
            f"grpo-ray sweep takes one sweep file, and overrides as {OVERRIDE}; got {' '.join(files) or 'no file'}"
        )
    print("loading libraries", flush=True)
    from grpo_ray.sweep.runner import run_sweep
    from grpo_ray.sweep.table import print_results

    summary = run_sweep(files[0], [word for word in words if is_override(word)])
    print_results(summary)
    if summary.stopped is not None:
        print(f"stopped by {summary.stopped}; run the same command to continue")
        return 128 + signal.Signals[summary.stopped]
    return 1 if any(record.standing == "failed" for record in summary.records.values()) else 0


def request_of_sweep(action: str, words: Sequence[str]) -> int:
    """Write a request about a trial to the folder of a sweep."""
    from grpo_ray.storage.run_folder import RunFolder
    from grpo_ray.storage.uris import split_path
    from grpo_ray.sweep.requests import apply_request, parse_request, write_request
    from grpo_ray.sweep.state import read_state

    request = parse_request(action, words[1:])
    path = words[0] if "://" in words[0] else os.path.abspath(os.path.expanduser(words[0]))
    folder = RunFolder(*split_path(path))
    state = read_state(folder)
    if state is None:
        raise ConfigError(f"{folder.uri} is not the folder of a sweep; give <run.storage_path>/<name of the sweep>")
    _, line = apply_request(state, request)  # refuses what has no effect
    write_request(folder, request)
    if request.action == "clone":  # the sweep names it, and checks the values
        line = f"{request.trial}: a clone is requested, and begins unless its settings are invalid"
    print(f"{line} (once the sweep has read the request; a sweep that has ended reads it when it is run again)")
    return 0


def run_watch(arguments: argparse.Namespace) -> NoReturn:
    """Serve the live page of a run until Ctrl-C."""
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"--port must be between 0 (a free one) and 65535; got {arguments.port}")
    from grpo_ray.pages.watch import watch

    def announce(url: str) -> None:
        print(f"watching {arguments.folder} at {url} (Ctrl-C ends it)", flush=True)

    watch(arguments.folder, arguments.port, arguments.open, announce)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not `return 0`: threads that wait for storage or for clients are still there. The end of the interpreter would
    # stop each of them wherever it is, and wait forever for a lock that one of them holds.
    os._exit(0)


def run_fork(arguments: argparse.Namespace) -> int:
    """Train the fork of a run, and compare it with the run."""
    from grpo_ray.experiments.fork_fields import require_changeable

    require_changeable(arguments.overrides)
    require_writable(arguments.json)
    print("loading libraries", flush=True)
    from grpo_ray.driver.tables import print_summary
    from grpo_ray.experiments.fork import fork
    from grpo_ray.experiments.tables import print_comparison

    forked = fork(
        arguments.source,
        arguments.at,
        arguments.overrides,
        config_path=arguments.config,
        trusts_settings=arguments.trust_settings,
    )
    print_summary(forked.summary)
    print_comparison(forked.comparison)
    if arguments.json:
        write_json(arguments.json, forked.comparison.to_dict())
    return exit_status(forked.summary, forked.stop_on)


def run_replay(arguments: argparse.Namespace) -> int:
    """Compute a recorded step again. Returns `FOUND` if it differs from the record."""
    from grpo_ray.experiments.fork_fields import require_changeable

    require_changeable(arguments.overrides, is_replay=True)
    require_writable(arguments.json)
    print("loading libraries", flush=True)
    from grpo_ray.experiments.replay import replay
    from grpo_ray.experiments.tables import print_replay

    outcome = replay(
        arguments.source,
        arguments.step,
        arguments.overrides,
        config_path=arguments.config,
        trusts_settings=arguments.trust_settings,
        keeps_folder=arguments.keep,
    )
    print_replay(outcome)
    if arguments.json:
        write_json(arguments.json, outcome.to_dict())
    return 0 if outcome.is_equal else FOUND


def run_contains(arguments: argparse.Namespace) -> int:
    """Find the problems of a file that the policy of a checkpoint was trained on."""
    from grpo_ray.experiments.tables import print_used_problems
    from grpo_ray.experiments.used_problems import find_used_problems

    require_writable(arguments.json)
    columns = None if arguments.columns is None else parse_columns(arguments.columns)
    found = find_used_problems(arguments.checkpoint, arguments.problems, columns)
    print_used_problems(found)
    if arguments.json:
        write_json(arguments.json, found.to_dict())
    if found.count("used"):
        return FOUND
    return NOT_KNOWN if found.count("unknown") else 0


def parse_columns(text: str) -> dict[str, str]:
    """Parse `--columns`, such as `prompt=question,solution=answer`; an empty text renames none. Raises ConfigError."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(ours and theirs for ours, _, theirs in pairs):
        raise ConfigError(f"--columns {text}: write pairs of names, as in --columns prompt=question,solution=answer")
    return {ours: theirs for ours, _, theirs in pairs}


def sort_overrides(arguments: argparse.Namespace) -> None:
    """Separate overrides from the file or checkpoint of a command that takes both, whatever their order.

    Raises:
        ConfigError: there are two files, or the command requires one and there is none; there is no such example.
    """
    if "overrides" not in arguments:
        return
    field = next(name for name in ("checkpoint", "source", "config") if name in arguments)
    noun = "run" if field == "source" else field
    words = [word for word in (getattr(arguments, field), *arguments.overrides) if word is not None]
    files = [word for word in words if not is_override(word)]
    if example := getattr(arguments, "example", None):
        if files:
            raise ConfigError(
                f"--example {example} and {files[0]!r}: give one config; `grpo-ray init` copies an example"
            )
        files = [str(example_path(example))]
    if len(files) > 1:
        raise ConfigError(
            f"{files[1]!r} is neither the only {noun} nor an override; give one {noun}, and overrides as {OVERRIDE}"
        )
    if not files and arguments.requires_file:
        raise ConfigError(f"there is no {noun}; give one before or after the overrides")
    setattr(arguments, field, files[0] if files else None)
    arguments.overrides = [word for word in words if is_override(word)]


def is_override(word: str) -> bool:
    """Return True for `section.field=value`; False for a path or URI, which may contain "=" too."""
    key, equals, _ = word.partition("=")
    return bool(equals) and "://" not in key and not os.path.exists(word)


def load_chaos_config(arguments: argparse.Namespace) -> Config:
    """Load the config of `chaos`; `run.hang_seconds` is short unless the user sets it."""
    defaults = {"run": {"hang_seconds": CHAOS_HANG_SECONDS}}
    return loader.load_config(arguments.config, arguments.overrides, defaults=defaults)


def check_names(config: Config) -> Config:
    """Load the functions that a config names and find its local files, and return it.

    A misspelled name then fails before libraries are imported and Ray is started.

    Raises:
        GrpoRayError: a function cannot be loaded, or files of problems or the policy's folder do not exist.
    """
    from grpo_ray.driver.preflight.names import check_functions, require_files

    check_functions(config)
    require_files(config)
    return config


def check_names_of_stages(stages: Stages) -> None:
    """Check all stages as `check_names` does; a stage with a summary may have ended, and need its files no more.

    Raises GrpoRayError; the message begins with the name of the stage.
    """
    from grpo_ray.driver.preflight.names import check_functions, require_files
    from grpo_ray.storage.run_folder import RunFolder

    for stage in stages:
        run = stage.config.run
        try:
            check_functions(stage.config)
            if not RunFolder(run.storage_path, run.name, run.storage_retry_seconds).exists("summary.json"):
                require_files(stage.config, has_policy=stage.number == 1)
        except GrpoRayError as error:
            raise type(error)(f"stage {stage.name}: {error}") from None


def load_eval_config(arguments: argparse.Namespace) -> Config:
    """Load the config of `eval`: the given file, that of the checkpoint's run folder, or the defaults."""
    if arguments.config:
        config = loader.load_config(arguments.config, arguments.overrides)
    else:
        where, settings = read_run_config(
            arguments.checkpoint,
            data_is_given=bool(arguments.data or arguments.suite),
            trusts_tools=arguments.trust_tools,
            trusts_engine=arguments.trust_engine,
            trusts_rewards=arguments.trust_rewards,
            score="correctness" if arguments.suite else given_score(arguments.overrides),
        )
        config = loader.load_config(where, arguments.overrides, settings=settings)
    if arguments.trust_remote_code:
        config = replace(config, model=replace(config.model, trust_remote_code=True))
    if arguments.suite:
        config = with_suite(config, arguments.suite, arguments.overrides)
    elif arguments.data:
        config = with_heldout(config, arguments.data)
    elif arguments.heldout and (dataset := named_heldout_set(config, arguments.heldout)) is not None:
        config = with_heldout(config, {arguments.heldout: dataset})
    return with_samples(config, arguments.num_samples) if arguments.num_samples is not None else config


def given_score(overrides: Sequence[str]) -> str | None:
    """Return the value that the last override of `heldout.score` sets; None if there is none, or the value is null."""
    values = [value for key, _, value in (word.partition("=") for word in overrides) if key == "heldout.score"]
    return values[-1] if values and values[-1] not in ("", "null") else None


def with_samples(config: Config, num_samples: int) -> Config:
    """Return the config with a number of completions per held-out problem.

    Several completions are sampled at a temperature above 0: greedy ones would all be equal.
    """
    if num_samples < 1:
        raise ConfigError(f"--num-samples must be at least 1; got {num_samples}")
    temperature = config.heldout.temperature or (config.sampling.temperature if num_samples > 1 else 0.0)
    return replace(config, heldout=replace(config.heldout, num_samples=num_samples, temperature=temperature))


def with_suite(config: Config, suite: str, overrides: Sequence[str]) -> Config:
    """Return the config with benchmarks as held-out sets, with all of their problems unless an override limits them.

    Completions may still call the run's tools. The run's environments, rollout function, form of completions, rewards
    and training problems are removed.
    """
    rollout = config.rollout
    is_limited = any(word.startswith("data.heldout_limit=") for word in overrides)
    sets = parse_suite(suite)
    scores = {BENCHMARKS[name].score for name in sets} & {*REWARD_SCORES}
    return replace(
        config,
        run=replace(config.run, best_metric=RunConfig.best_metric),
        data=replace(
            config.data,
            train=DataConfig.train,
            heldout=sets,
            heldout_limit=config.data.heldout_limit if is_limited else None,
        ),
        heldout=replace(config.heldout, score=None),
        rewards=replace(
            config.rewards,
            functions=("correctness",),
            settings={name: value for name, value in config.rewards.settings.items() if name in scores},
        ),
        grpo=replace(config.grpo, trl={k: v for k, v in config.grpo.trl.items() if k != "reward_weights"}),
        rollout=replace(rollout, environment=None, function=None, settings={}) if rollout.tools else RolloutConfig(),
    )


def with_heldout(config: Config, heldout: str | Mapping[str, str]) -> Config:
    """Return the config with other held-out problems; `run.best_metric` is reset, since its set may be missing."""
    run = replace(config.run, best_metric=RunConfig.best_metric)
    return replace(config, run=run, data=replace(config.data, heldout=heldout))


def named_heldout_set(config: Config, name: str) -> str | None:
    """Return the dataset of a named held-out set; None if the set belongs to a source of a mixture.

    Raises:
        ConfigError: there is no set of this name.
    """
    sets = config.data.heldout
    if not isinstance(sets, Mapping) and config.is_mixture:
        names = list(map(heldout_label, config.heldout_keys))
        if name in names:
            return None
        raise ConfigError(
            f"--heldout {name}: data.train has no source of this name, but {', '.join(names)}{suggestion(name, names)}"
        )
    if not isinstance(sets, Mapping):
        raise ConfigError(f"--heldout {name}: data.heldout={sets} has no named sets; leave the option out")
    if name not in sets:
        names = list(sets)
        raise ConfigError(
            f"--heldout {name}: data.heldout has no set of this name, but {', '.join(names)}{suggestion(name, names)}"
        )
    return sets[name]


def read_run_config(checkpoint: str, **trust: Any) -> tuple[str | None, dict[str, Any]]:
    """Read the settings that an evaluation takes from the run that a checkpoint belongs to.

    Args:
        checkpoint: folder or URI.
        **trust: keyword arguments of `recorded.evaluation_settings`.

    Returns:
        URI of the run's config, and section -> fields; (None, {}) if the checkpoint is not in a run folder.

    Raises:
        DamagedFileError: the config cannot be read, or the run folder has links that lead out of it or files that
            grpo_ray does not write.
        CheckpointError: the checkpoint has files that its manifest does not list.
        ConfigError: the config names problems, tools or engine arguments that are not accepted from a run folder.
    """
    from grpo_ray.config import recorded
    from grpo_ray.storage.checkpoints import list_checkpoints, require_listed_files
    from grpo_ray.storage.recorded_config import read_recorded
    from grpo_ray.storage.run_folder import RunFolder
    from grpo_ray.storage.uris import split_path

    path = checkpoint if "://" in checkpoint else os.path.abspath(os.path.expanduser(checkpoint))
    run = RunFolder(*split_path(split_path(path)[0]))
    if not run.exists(recorded.RECORDED_CONFIG):
        return None, {}
    run.require_plain_files()
    stored = list_checkpoints(run)
    for each in stored:
        if each.name == split_path(path)[1]:
            require_listed_files(each)
    try:
        settings = read_recorded(run)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; name a config with --config {CONFIG}") from None
    return run.uri_of(recorded.RECORDED_CONFIG), recorded.evaluation_settings(settings, **trust)


def train_help() -> str:
    """Describe every field of the YAML with its default; TRL's own fields come last."""
    lines = [
        f"usage: grpo-ray train [{CONFIG} | --example NAME] [{OVERRIDE} ...]",
        "",
        "Train from a YAML file, or continue the run of that name; `--example help` lists the configs of the package. "
        "A file with `stages` runs them one after the other; stages.NAME.section.field=value sets a field of one of "
        "them. Set fields in the file, or on the command line:",
    ]
    for section, fields in loader.describe_fields().items():
        lines.append(f"\n{section}:")
        for name, (default, text) in fields.items():
            shown = json.dumps(default, default=lambda value: dict(value) if hasattr(value, "keys") else list(value))
            lines.append(f"  {section}.{name}={shown}\n      {text}")
    lines.append("\ngrpo, fields of TRL's GRPOConfig:")
    for name in PASSED:
        lines.append(f"  grpo.{name}={default_text(name)}")
        lines.append(f"      {allowed_values(name).capitalize()}. {meaning(name)}")
    return "\n".join(lines)


def to_json(value: dict[str, Any]) -> str:
    """Return a value as indented JSON, with null for an unknown number, such as the interval of a single problem."""
    return json.dumps(json_values(value), indent=2, allow_nan=False) + "\n"


def require_writable(path: str | None) -> None:
    """Refuse a file that cannot be written, before anything long starts; None names no file. Raises ConfigError."""
    if path is None:
        return
    file = Path(path)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--json {path} cannot be written: name a file in a folder that exists and is yours")


def write_json(path: str, value: dict[str, Any]) -> None:
    """Write a value as an indented JSON file, with secrets hidden in its texts."""
    Path(path).write_text(to_json(redact(value)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
