"""Tables that the commands print on the terminal."""

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grpo_ray.config.heldout_keys import heldout_label, split_name, training_name
from grpo_ray.config.schema import Config
from grpo_ray.data.stream import describe_heldout_part
from grpo_ray.driver.summary import PAUSED, RunSummary, phase_breakdown
from grpo_ray.models.memory import GIB, GPU_CARDS, CardMemory
from grpo_ray.observers.terminal.live_view import ASCII, MAX_WIDTH, UNICODE, duration
from grpo_ray.resilience.chaos import FAULT_KINDS, FaultOutcome
from grpo_ray.telemetry.goodput import goodput_rows
from grpo_ray.telemetry.measures import ACCURACY_MEASURES, recorded_measure
from grpo_ray.text.display import one_line

if TYPE_CHECKING:  # these modules import libraries that not every command needs
    from grpo_ray.driver.attack import AttackReport
    from grpo_ray.driver.forecast import Forecast
    from grpo_ray.driver.preflight.audit import AuditReport, SplitReport
    from grpo_ray.evaluation.metrics import EvaluationResult
    from grpo_ray.evaluation.probes import ProbeReport
    from grpo_ray.rewards.solution_check import Coverage

EXAMPLES = 5
"""Rows of each kind of finding that are printed; the JSON report has all of them."""
TOPICS = 20
"""Kinds or topics that are printed."""
EXCERPT = 300
"""Characters of a text that are printed."""
PLAIN_WIDTH = 160
"""Characters per line where the output is not a terminal."""


def print_summary(summary: RunSummary) -> None:
    """Print the result of a run, one line per value."""
    rows: list[tuple[str, str]] = []
    for key, heldout in summary.heldout.items():
        for when, measures in (("before", heldout.before), ("after", heldout.after)):
            accuracy = recorded_measure(measures, ACCURACY_MEASURES)
            value = f"{accuracy or '-'}  ({heldout.problems} problems)"
            if summary.stopped not in (None, PAUSED) and not measures:
                value = f"not measured: the launch was stopped by {summary.stopped}"
            rows.append((f"{split_name(key)} {when}", value))
    rows.append(("reward", f"{_decimal(summary.reward_first)} -> {_decimal(summary.reward_last)}"))
    rows.append(("steps", f"{summary.steps} in {summary.train_seconds:.0f} s of training"))
    rows.append(("training time", phase_breakdown(summary.phase_seconds)))
    rows.append(("completions per second", f"{summary.completions_per_second:.1f}"))
    rows.append(("wall time", f"{summary.wall_seconds:.0f} s of this launch; all else is of the whole run"))
    rows.append(("best checkpoint", summary.best_checkpoint or "-"))
    rows.append(("latest checkpoint", summary.latest_checkpoint or "-"))
    if summary.best_checkpoint:
        trust = " --trust-tools" if summary.has_own_tools else ""
        trust += " --trust-rewards" if summary.has_own_score else ""
        command = shlex.join([_command_name(), "eval", summary.best_checkpoint])
        rows.append(("evaluate it with", f"{command} --num-samples 8{trust}"))
    rows += goodput_rows(summary.price) if summary.price else []
    console = wide_console()
    # The same style as the live view, which this table replaces.
    rule = UNICODE.rule if not console.options.ascii_only else ASCII.rule
    end = rule * (min(console.width, MAX_WIDTH) - len("-- summary "))
    if console.is_terminal:
        console.print()
    console.print(Text.assemble((f"{rule * 2} ", "dim"), ("summary", "bold"), (f" {end}", "dim")))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        # Paths and commands are left to the terminal's own wrapping, so that they can be copied in one piece.
        can_wrap = console.is_terminal and "/" not in value
        lines = textwrap.wrap(value, console.width - width) if can_wrap else [value]
        text = f"\n{' ' * width}".join(lines)
        console.print(Text.assemble((name.ljust(width), "dim"), text), soft_wrap=True)


def print_fault_outcomes(outcomes: Sequence[FaultOutcome], missing: int, repeated: int) -> None:
    """Print the effects of injected faults.

    Args:
        missing: groups that the run's steps lack.
        repeated: problems used more than once in an epoch.
    """
    table = Table(title="faults", title_justify="left")
    for column in ("step", "worker", "fault", "effect"):
        table.add_column(column)
    for outcome in outcomes:
        fault = outcome.fault
        table.add_row(str(fault.step), str(fault.rank), FAULT_KINDS[fault.kind], _effect(outcome))
    Console().print(table, highlight=False)
    lost = "nothing was lost" if not missing else f"{missing} groups are missing from the run's steps"
    print(f"{lost}; {repeated or 'no'} problems were used twice in an epoch")


def _effect(outcome: FaultOutcome) -> str:
    if not outcome.injected:
        return "was not injected"
    if outcome.recovery_seconds is None:
        return "training continued"
    return f"training again after {outcome.recovery_seconds:.1f} s"


def print_evaluation(evaluation: "EvaluationResult", name: str = "", *, is_verdict: bool = True) -> None:
    """Print the measures of a policy on one held-out set with their confidence intervals.

    Args:
        name: name of the set; "" for one without.
        is_verdict: True if `heldout.score` is correctness, so that a completion is right or wrong.
    """
    k = evaluation.num_samples
    title = f"{name + ': ' if name else ''}{evaluation.problems} problems, {k} completions each"
    table = Table(title=escape(title), title_justify="left")
    for column in ("measure", "value", "95 % interval"):
        table.add_column(column)
    measures = {"pass@1" if is_verdict else "mean score": evaluation.pass_at_1}
    if k > 1:
        measures |= {f"pass@{k}" if is_verdict else f"best of {k}": evaluation.pass_at_k}
    if k > 1 and evaluation.maj_at_k is not None:
        measures |= {f"maj@{k}": evaluation.maj_at_k}
    for name, estimate in measures.items():
        table.add_row(name, f"{estimate.value:.3f}", f"{estimate.low:.3f} to {estimate.high:.3f}")
    if evaluation.reward is not None:
        table.add_row("environment's reward", f"{evaluation.reward:.3f}", "")
    table.add_row("truncated", f"{evaluation.truncated_share:.3f}", "")
    table.add_row("unscorable problems", str(evaluation.unscorable), "")
    Console().print(table, highlight=False)


def print_audit(report: "AuditReport", config: Config) -> None:
    """Print an audit: splits, kinds and topics, findings, rewards, memory.

    Args:
        config: config of the run.
    """
    console = wide_console()

    def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(*columns)
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))  # a solution such as [0, 1] is not markup
        console.print(escape(title), table, sep="\n", highlight=False)

    names = [*map(training_name, report.sources), *map(split_name, report.heldout)]
    show(f"checked in {report.seconds:.0f} s", ["", *names], _split_rows(report))
    for key, split in report.heldout.items():
        if split.is_part_of_training:
            training = report.sources.get(heldout_label(key)) or report.training
            counts = (each.problems - each.duplicates for each in (split, training))
            console.print(escape(describe_heldout_part(split.name, *counts)), highlight=False)
    for source, training in report.sources.items():
        name = training_name(source)
        for title, coverage in (("kind of answer", training.kinds), ("topic", training.topics)):
            if coverage:
                columns = [title, "problems", "verified", "ms per verdict"]
                show(f"{name} solutions", columns, _coverage_rows(coverage)[:TOPICS])
        of_source = f" ({source})" if source else ""
        if never := [[row.id, row.solution, row.reason] for row in training.unverifiable[:EXAMPLES]]:
            show(f"can never be rewarded{of_source}", ["id", "solution", "reason"], never)
        if overlong := [[each.id, each.tokens] for each in training.overlong[:EXAMPLES]]:
            show(f"prompts too long, left out of training{of_source}", ["id", "tokens"], overlong)
        if fooled := [[row.id, row.solution, row.answer] for row in training.fooled[:EXAMPLES]]:
            show(f"solved by the next row's solution{of_source}", ["id", "solution", "next row's"], fooled)
    tried = [[run.reward, run.note or _rewards(run.right), _rewards(run.wrong)] for run in report.rewards]
    show("rewards, tried on the first problems", ["reward", "right completions", "wrong completions"], tried)
    if report.tools is not None:
        calls = [[each.name, each.arguments, each.status, each.result, each.seconds] for each in report.tools.trials]
        title = f"tools and environments, tried once ({report.tools.prompt_tokens} tokens describe them in a prompt)"
        show(title, ["", "arguments", "status", "result", "seconds"], calls)
        for notice in report.tools.notices:
            console.print(escape(notice), highlight=False)
    show_memory(report.memory, config, show)


def print_probes(reports: "Sequence[ProbeReport]") -> None:
    """Print the rewards of completions without merit, with those of honest ones."""
    console = wide_console()
    for report in reports:
        table = Table("", "reward", "")
        for probe in report.honest:
            table.add_row(escape(probe.name), _decimal(probe.reward), "")
        for probe in report.others[: max(EXAMPLES, len(report.holes))]:
            table.add_row(escape(probe.name), _decimal(probe.reward), "pays" if probe in report.holes else "")
        of_source = f" ({report.source})" if report.source else ""
        title = f"completions without merit{of_source}: mean reward over {report.problems} problems, best paid first"
        console.print(escape(title), table, sep="\n", highlight=False)


def print_attack(report: "AttackReport") -> None:
    """Print the means of the first and of the last steps, and the completions with the highest rewards."""
    console = wide_console()
    title = f"{report.policy} trained against the rewards, {report.steps} steps"
    title += f", stopped by {report.stopped}" if report.stopped else ""
    table = Table("", "first steps", "last steps")
    for name, value in report.first.items():
        table.add_row(name, f"{value:.3f}", _decimal(report.last.get(name)))
    console.print(escape(title), table, sep="\n", highlight=False)
    table = Table("reward", "step", "prompt", "completion", show_lines=True)
    for each in report.completions:
        texts = (escape(one_line(text, EXCERPT)) for text in (each.prompt, each.completion))
        table.add_row(f"{each.reward:.3f}", str(each.step), *texts)
    console.print("what paid most in its last steps", table, sep="\n", highlight=False)
    print(f"{_command_name()} report {shlex.quote(report.folder)} shows the whole attack")


def print_forecast(result: "Forecast", config: Config) -> None:
    """Print a forecast, one line per value.

    Args:
        config: config of the run.
    """
    grpo = config.grpo
    table = Table(f"{result.steps} steps without learning", "")
    rows = [
        ("groups with signal", f"{result.signal} of {result.groups}"),
        ("reward", f"{result.reward:.3f}"),
        ("completions", f"{result.length:.0f} tokens, {result.truncated_share:.1%} truncated"),
        ("start-up", duration(result.startup_seconds, decimals=True)),
        ("step", f"{result.step_seconds:.2f} s"),
        ("checkpoint and measurement", f"{result.saving_seconds:.1f} s, every {grpo.save_steps} steps"),
        (
            f"all {grpo.max_steps} steps",
            f"{duration(3600 * result.hours)}, as long as completions keep their length",
        ),
    ]
    if result.gpus:
        cost = "" if result.cost is None else f", {result.cost:.2f} at the price given"
        rows.append((f"GPU hours, {result.gpus} GPUs", f"{result.gpu_hours:.1f}{cost}"))
    for key, measure in result.baseline.items():
        gain = result.smallest_gain.get(key)
        chance = "" if gain is None else f"; a gain below {gain:.3f} may be chance"
        rows.append((split_name(key), f"{measure}{chance}"))
    for row in rows:
        table.add_row(*map(escape, row))
    console = wide_console()
    console.print("forecast", table, sep="\n", highlight=False)


def _split_rows(report: "AuditReport") -> list[list[object]]:
    """Return one row per property, with a column for each split."""
    splits: tuple[SplitReport, ...] = (*report.sources.values(), *report.heldout.values())
    lengths = [split.lengths for split in splits]
    properties: dict[str, list[object]] = {
        "problems": [f"{split.problems} of {split.name}" for split in splits],
        "prompt tokens, 50/90/99 %/max": [f"{x.p50} / {x.p90} / {x.p99} / {x.max}" for x in lengths],
        "overlong prompts, left out": [f"{x.over_limit} (over {x.limit} tokens)" for x in lengths],
        "duplicate rows": [" ".join((str(split.duplicates), *split.duplicate_ids)) for split in splits],
        "held-out problems also in training": [*[""] * len(report.sources), *report.heldout_in_training.values()],
    }
    if not any(split.verified for split in splits):  # no built-in reward reads the solutions
        return [[name, *values] for name, values in properties.items()]
    properties |= {
        "solutions verified": [split.verified for split in splits],
        "rewarded in a box / in a formula": [f"{split.boxed} / {split.formula}" for split in splits],
        "can never be rewarded": [len(split.unverifiable) for split in splits],
        "solved by the next row's solution": [f"{len(split.fooled)} of {split.probes}" for split in splits],
    }
    return [[name, *values] for name, values in properties.items()]


def _coverage_rows(coverage: Mapping[str, "Coverage"]) -> list[list[object]]:
    return [
        [name, each.problems, f"{each.verified / each.problems:.1%}", f"{each.seconds * 1e3:.1f}"]
        for name, each in coverage.items()
    ]


ShowTable = Callable[[str, Sequence[str], Sequence[Sequence[object]]], None]
"""Prints a table: title, columns, rows."""


def show_memory(cards: Sequence[CardMemory], config: Config, show: ShowTable) -> None:
    """Show a worker's memory on each GPU, and its parts on the smallest one on which it fits."""
    if config.engine.is_dedicated:
        _show_dedicated_memory(cards, config, show)
        return
    fraction = cards[0].plan.gpu_memory_utilization
    millions = cards[0].plan.estimate.parameters / 1e6
    columns = ["GPU", "usable", "used", "fits", "learner", "tokens per pass", "recomputes", "completions at once"]
    rows = [
        [
            each.card,
            f"{GPU_CARDS[each.card]:.1f}",
            f"{each.plan.used / GIB:.1f}",
            "yes" if each.plan.fits else "no",
            f"{each.plan.estimate.learner / GIB:.1f}",
            f"{each.plan.tokens_per_micro_batch:,}",
            "yes" if each.plan.gradient_checkpointing else "no",
            each.completions_at_once,
            each.recommended_utilization or "-",
        ]
        for each in cards
    ]
    title = f"GPU memory of one worker, {millions:,.1f}M parameters, engine.gpu_memory_utilization={fraction:g}"
    show(f"{title} (GiB, estimated, not measured)", [*columns, "recommended fraction"], rows)
    shown = next((each for each in cards if each.plan.fits), cards[-1])
    parts = [[name, f"{size / GIB:.2f} GiB"] for name, size in shown.plan.estimate.parts.items()]
    show(f"parts on a GPU of {shown.card}", ["", ""], parts)


def _show_dedicated_memory(cards: Sequence[CardMemory], config: Config, show: ShowTable) -> None:
    """Show the memory of a worker and of a dedicated engine on each GPU, which may be of different sizes."""
    fraction = cards[0].plan.gpu_memory_utilization
    millions = cards[0].plan.estimate.parameters / 1e6
    workers, engine = config.to_dict()["cluster"]["num_workers"], config.to_dict()["engine"]
    of_worker = [
        [
            each.card,
            f"{GPU_CARDS[each.card]:.1f}",
            f"{each.plan.used / GIB:.1f}",
            "yes" if each.plan.fits else "no",
            f"{each.plan.tokens_per_micro_batch:,}",
            "yes" if each.plan.gradient_checkpointing else "no",
        ]
        for each in cards
    ]
    columns = ["GPU", "usable", "used", "fits", "tokens per pass", "recomputes"]
    title = f"GPU memory of a worker (cluster.num_workers={workers}), which holds the learner alone"
    show(f"{title}, {millions:,.1f}M parameters (GiB, estimated, not measured)", columns, of_worker)
    of_engine = [
        [
            each.card,
            f"{GPU_CARDS[each.card]:.1f}",
            f"{fraction * GPU_CARDS[each.card]:.1f}",
            "yes" if each.engine_fits else "no",
            f"{each.plan.estimate.engine_fixed / GIB:.1f}",
            each.completions_at_once,
        ]
        for each in cards
    ]
    columns = ["GPU", "usable", "used", "fits", "without KV cache", "completions at once"]
    count = f"engine.replicas={engine['replicas']}, engine.tensor_parallel_size={engine['tensor_parallel_size']}"
    show(f"GPU memory of a dedicated engine ({count}, engine.gpu_memory_utilization={fraction:g})", columns, of_engine)
    shown = next((each for each in cards if each.plan.fits), cards[-1])
    parts = [[name, f"{size / GIB:.2f} GiB"] for name, size in shown.plan.estimate.parts.items()]
    show(f"parts on a worker's GPU of {shown.card} and on an engine's GPU", ["", ""], parts)


def _rewards(values: Sequence[float | None]) -> str:
    return "  ".join("none" if value is None else f"{value:g}" for value in values)


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def wide_console() -> Console:
    """Return a console that wraps lines only on a terminal, so that paths and ids in other output stay in one piece."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console


def _command_name() -> str:
    """Return the command as the user can call it: by name if it is on the PATH, else by its path."""
    script = Path(sys.executable).with_name("grpo-ray")
    return "grpo-ray" if shutil.which("grpo-ray") or not script.exists() else os.path.relpath(script)
