"""Every benchmark script, run as a user runs it, in its smallest size.

The tests assert figures that are missing or zero in the output of a script that measured nothing.
`tests/unit/test_commands.py` asserts that every script is run here.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import worker_group

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HELPERS = ROOT / "tests" / "helpers"
SCRIPTS = sorted(
    path.name
    for path in HERE.glob("*.py")
    if path != Path(__file__) and 'if __name__ == "__main__"' in path.read_text()
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SMALL_RUN = [
    "cluster.num_workers=1", "cluster.threads_per_worker=1", "grpo.prompts_per_step=4", "grpo.num_generations=4",
    "data.heldout_limit=4",
]  # fmt: skip
"""Overrides of runs of the embedded task."""


def run(script: str, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
    """Run a script of this folder in a process of its own; return its output."""
    return output_of(f"tests/benchmarks/{script}", *map(str, arguments), environment=environment)


def output_of(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run Python with the arguments; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment_of(environment),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment_of(more: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment variables of a script."""
    # The folder of the rewards of the tests, which the fixture `cluster` adds only where another test has asked for it.
    paths = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": paths} | ONE_THREAD | dict(more or {})


@pytest.fixture
def run_forked(tmp_path: Path) -> Callable[..., str]:
    """Return a function as `run`, for scripts that spend most of a small run on the import of torch and TRL.

    Their processes are forked from one that has imported them. Their temporary folders are below the test's.
    """

    def run_script(script: str, *arguments: object) -> str:
        output = tmp_path / "output"
        environment = environment_of({"TMPDIR": str(tmp_path)})
        status = worker_group.run_script(HERE / script, [*map(str, arguments)], output, environment)
        text = output.read_text()
        assert status == 0, text
        return text

    return run_script


@pytest.fixture
def run_here(cluster: None, run_in_process: Callable[..., str]) -> Callable[..., str]:
    """Return `run_in_process`, for scripts whose runs use the tests' cluster as the tests do.

    As parts of one Ray job, their workers are forked from warm servers; those of another job import all libraries
    (`warm_start.py`).
    """
    return run_in_process


@pytest.fixture
def run_in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Yield a function that runs a script in this process and returns its output.

    The environment is restored after the test, as some scripts set variables for their workers.
    """
    environment = dict(os.environ)
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])

    def run_script(script: str, *arguments: object) -> str:
        path = HERE / script
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        capfd.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capfd.readouterr().out

    yield run_script
    os.environ.clear()
    os.environ.update(environment)


def numbers(pattern: str, text: str) -> list[float]:
    """Return the groups of the only match of a pattern, as numbers."""
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern!r} matches {len(found)} times in:\n{text}"
    return [float(each.replace(",", "")) for each in (found[0] if isinstance(found[0], tuple) else found)]


def cells(text: str, first: str) -> list[list[str]]:
    """Return the cells of the Markdown rows that begin with a text."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {first}")
    ]


PRINT_HELP = """
import contextlib, io, json, runpy, sys

sys.path.insert(0, "tests/benchmarks")

printed = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    output = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output):
        runpy.run_path(script, run_name="__main__")
    printed[script] = output.getvalue()
print(json.dumps(printed))
"""
"""Program that prints what each script prints with `--help`."""


@pytest.fixture(scope="module")
def usages() -> dict[str, str]:
    """Script -> its help, of one process for all scripts, some of which import libraries for many seconds."""
    text = output_of("-c", PRINT_HELP, *(f"tests/benchmarks/{script}" for script in SCRIPTS))
    printed: dict[str, str] = json.loads(text.splitlines()[-1])
    return printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_help_names_its_arguments(script: str, usages: dict[str, str]) -> None:
    assert f"usage: {script} [-h]" in usages[f"tests/benchmarks/{script}"]


# Runs on the tests' cluster


@pytest.mark.slow
def test_bench_curve_measures_both_systems(run_here: Callable[..., str]) -> None:
    text = run_here("bench_curve.py", "--seeds", 1, "--steps", 1, "--problems", 40, *SMALL_RUN, "--here")
    (before,) = numbers(r"before: ([\d.]+); 1 steps", text)
    assert 0 < before < 1
    for system in ("ours", "stock"):
        accuracy, seconds = numbers(rf"seed 1 {system} +([\d.]+) +(\d+) s", text)
        assert abs(accuracy - before) < 0.3 and seconds > 0


@pytest.mark.slow
def test_bench_failure_measures_each_phase_of_a_restart(run_here: Callable[..., str], policy: Path) -> None:
    sizes = ["grpo.max_steps=3", "grpo.save_steps=1", *SMALL_RUN, "--at", 2]
    text = run_here("bench_failure.py", f"model.path={policy}", *sizes)
    phases = ("detection", "restart", "engine and learner", "repeated steps", "total")
    seconds = [numbers(rf"{phase} +([\d.]+) +[\d.]+", text)[0] for phase in phases]
    assert all(each >= 0 for each in seconds) and seconds[-1] > 1
    assert abs(sum(seconds[:-1]) - seconds[-1]) < 0.5
    assert numbers(r"checkpoints: (\d+), training waited [\d.]+ s of ([\d.]+) s", text)[0] == 3


@pytest.mark.slow
def test_bench_floor_measures_our_step_and_its_floor(run_here: Callable[..., str]) -> None:
    sizes = ["--tiny", "--warm", 1, "--steps", 1, 1, 1, "--workers", 1, "--threads", 1, "--micro", 1]
    text = run_here("bench_floor.py", *sizes)
    for pattern in ("every", "half", "86 % none"):
        figures = numbers(rf"{pattern} +([\d.]+) s +([\d.]+) s +([\d.]+) s +[\d.]+ s +(\d+) +([\d.]+)x", text)
        assert all(figures)


@pytest.mark.slow
def test_bench_health_names_the_warning_of_a_wrong_run(run_here: Callable[..., str], policy: Path) -> None:
    sizes = ["grpo.max_steps=10", *SMALL_RUN, "--runs", "constant reward"]
    text = run_here("bench_health.py", f"model.path={policy}", *sizes)
    (row,) = cells(text, "constant reward")
    assert row[1:3] == ["`group/equal_share` 1 to 1", "from the start"]
    assert re.fullmatch(r"`no_signal` at \d+", row[3])


@pytest.mark.slow
def test_bench_observers_compares_steps_with_and_without(policy: Path) -> None:
    # Steps that sleep, so that several are left to measure, however slowly the page starts.
    slow = [
        "rewards.functions=['reward_spies:wait']",
        "heldout.score=correctness",
        "rewards.settings={'reward_spies:wait': {seconds: 0.5}}",
    ]
    sizes = ["--rounds", 1, "--steps", 12, "--trackers", "tensorboard", f"model.path={policy}", *SMALL_RUN, *slow]
    text = run("bench_observers.py", *sizes)  # on a cluster of its own, whose workers are forked from warm servers
    off, on = (numbers(rf"\b{name} +step ([\d.]+) s +processor ([\d.]+) ms", text) for name in ("off", "on"))
    assert all(off) and all(on)
    assert on[1] > off[1]  # the trackers' processes and the page


@pytest.mark.slow
def test_bench_overlap_measures_late_and_early_scoring(run_here: Callable[..., str]) -> None:
    text = run_here("bench_overlap.py", 7, "--pairs", 1, *SMALL_RUN)
    for variant in ("late", "early"):
        step, after_generation = numbers(rf"{variant} +step ([\d.]+) s, scoring after generation ([\d.]+) s", text)
        assert 0 <= after_generation < step  # early scoring may end before generation does


def test_bench_placement_prints_both_tables() -> None:
    published, gains, seconds = run("bench_placement.py", "--tiny").strip().split("\n\n")
    rows = [line.split(" | ") for line in published.splitlines()[2:]]
    assert len(rows) == 3 and all(float(cell) > 0 for row in rows for cell in row[2:5])
    (row,) = (line.split(" | ") for line in gains.splitlines()[2:])
    assert all(0.1 < float(cell.split()[0]) < 10 for cell in row[3:7])  # k = 0, 1, 2, 4
    assert numbers(r"simulated in (\d+) s", seconds)


@pytest.mark.slow
def test_bench_scale_measures_every_part(run_here: Callable[..., str]) -> None:
    text = run_here("bench_scale.py", "--problems", 3_000, "--workers", 1, "--tiny")
    tables = text.split("\n\n")
    data, ledger, rollouts = (next(each for each in tables if each.startswith(title)) for title in (
        "Data and control, measured", "Ledger, half of an epoch used, measured", "Rollouts, measured",
    ))  # fmt: skip
    rows = [[float(cell.strip("%").replace(",", "")) for cell in line.split()] for line in data.splitlines()[2:]]
    assert [(row[1], row[3]) for row in rows] == [(2, 0), (2, 50), (1, 0), (1, 0)]  # workers, share of used problems
    for row in rows:
        assert all(row[column] > 0 for column in (5, 7, 8, 12, 13, 14))  # index, tasks, first, steps, a report, driver
    ((problems, size, *_),) = (line.split() for line in ledger.splitlines()[2:])
    assert problems == "10,000" and int(size.replace(",", "")) > 8 * 5_000  # half of them are used
    assert [line.split()[0] for line in rollouts.splitlines()[2:]] == ["3,200", "6,400"]
    assert all(int(line.split()[1]) > 10 for line in rollouts.splitlines()[2:])  # bytes of a group
    assert numbers(r"small files of a worker +([\d.]+) ms", text)[0] > 0


def test_bench_staleness_compares_with_the_simulation(run_here: Callable[..., str]) -> None:
    text = run_here("bench_staleness.py", "--tiny", "--steps", 2)
    rows = [*cells(text, "colocated"), *cells(text, "dedicated")]
    assert [row[0] for row in rows] == ["colocated", *(f"dedicated, k = {k}" for k in (0, 1, 2, 4))]
    seconds, simulated = ([float(row[column]) for row in rows] for column in (1, 3))
    # Unless completions are continued, each engine has the work of the simulated one, and sleeps for at least as long.
    assert all(real > 0.99 * model > 0 for real, model in list(zip(seconds, simulated, strict=True))[:3])
    assert simulated[2] > simulated[3] > simulated[4] and min(seconds[3:]) > 0  # shorter segments, shorter rounds
    assert [float(row[2]) for row in rows] == pytest.approx([seconds[0] / each for each in seconds], rel=0.05)


@pytest.mark.slow
def test_bench_slow_tools_compares_with_the_simulation(run_here: Callable[..., str]) -> None:
    text = run_here("bench_slow_tools.py", "--steps", 1, "--tool-seconds", 0.1)
    rows = [*cells(text, "colocated"), *cells(text, "dedicated")]
    assert [row[0] for row in rows] == ["colocated", *(f"dedicated, k = {k}" for k in (0, 1, 2, 4))]
    seconds, simulated = ([float(row[column]) for row in rows] for column in (1, 3))
    # Engines, learner and tool sleep for at least as long as the simulated ones.
    assert all(real > 0.99 * model > 0 for real, model in zip(seconds, simulated, strict=True))
    assert simulated[2] > simulated[3] > simulated[4]  # fewer turns in a round


def test_bench_step_compares_ours_with_stock_trl(run_here: Callable[..., str]) -> None:
    assert_compared(run_here, "ours", "trl")


@pytest.mark.slow
def test_bench_step_compares_ours_with_the_peers_that_use_vllm() -> None:
    assert_compared(run, "ours", "trl-vllm", "ray")


def assert_compared(run_script: Callable[..., str], *peers: str) -> None:
    """Assert that the benchmark of a step measures these systems, with every pattern."""
    sizes = ["--tiny", "--warm", 1, "--steps", 1, 1, 1, "--peer-steps", 1, 1, 1, "--workers", 1, "--threads", 1]
    text = run_script("bench_step.py", "--peers", *peers, *sizes, "--micro", 1)
    patterns = ("every", "half", "86 % none")
    for peer in peers:
        (rates,) = re.findall(rf"^{peer}, 1 micro-batches: (.*) completions/s", text, re.MULTILINE)
        assert set(json.loads(rates)) == set(patterns) and all(json.loads(rates).values())
    for pattern in patterns:
        assert all(numbers(rf"(?m)^{pattern} +([\d.]+) c/s" + r" +([\d.]+)x" * (len(peers) - 1), text))


@pytest.mark.slow
def test_bench_workers_measures_the_rate_of_a_worker(run_here: Callable[..., str]) -> None:
    text = run_here("bench_workers.py", "--tiny", "--workers", 1, "--warm", 1, "--steps", 1)
    workers, groups, step, rate, speed_up = numbers(r"(\d+) +(\d+) +([\d.]+) s +([\d.]+) c/s +([\d.]+)x +100%", text)
    assert (workers, groups, speed_up) == (1, 4, 1.0)
    assert step > 0 and abs(rate * step - 32) < 0.1 * 32  # 4 groups of 8


# Without a cluster, or with one of their own


@pytest.mark.slow
def test_bench_engine_measures_every_variant() -> None:
    sizes = ["--policies", "tiny", "--dtypes", "float32", "--threads", 1, "--requests", 8, "--rounds", 1]
    text = run("bench_engine.py", *sizes)
    assert "tiny, float32, 1 threads, 8 requests of" in text
    for variant in ("as vLLM", "noise", "unpacked", "packed", "ours"):
        assert all(numbers(rf"[:,] {variant} ([\d.]+) s \(([\d.]+)x\)", text))


@pytest.mark.slow
def test_bench_long_run_measures_memory_and_the_page() -> None:
    text = run("bench_long_run.py", "--steps", 2000, "--metrics", 5, "--rows", 2)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(rows) == 2 and all(value > 0 for row in rows for value in row.values())
    assert "summary of 2000 steps" in text
    assert numbers(r"peak of the process (\d+) MiB; files .*'metrics.jsonl': (\d+)", text)[1] > 10_000


@pytest.mark.slow
def test_bench_weight_proof_measures_a_proof(run_forked: Callable[..., str]) -> None:
    (row,) = cells(run_forked("bench_weight_proof.py", "--only", "embedded", "--repeats", 1), "embedded")
    weights, seconds, memory = (float(cell.replace(",", "")) for cell in row[2:5])
    assert weights == 0.6 and seconds > 0 and 0 <= memory < 100  # the embedded policy's may fit into free memory


@pytest.mark.slow
def test_bench_micro_batches_plans_every_variant(run_forked: Callable[..., str]) -> None:
    rows = cells(run_forked("bench_micro_batches.py", "--steps", 1), "")[1:]
    assert len(rows) == 2 * 3 * 4  # worker counts, shares of groups with signal, variants
    assert all(int(row[3]) >= 1 and int(row[4].rstrip("k")) > 0 for row in rows)


def test_bench_rewards_compares_the_pool_with_inline(tmp_path: Path) -> None:
    rows = [{"completions": [f"The sum is \\boxed{{{n}}}.", "\\boxed{0}"], "solution": f"${n}$"} for n in range(1, 11)]
    data = tmp_path / "completions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run("bench_rewards.py", "--data", data, "--repeats", 2, "--inline-repeats", 1, "--processes", 1)
    assert numbers(r"inline Math-Verify +(\d+) /s", text)[0] > 0
    for strict in (True, False):
        assert all(numbers(rf"pool of 1, strict={strict} +(\d+) /s +([\d.]+) x inline", text))


@pytest.mark.slow
def test_bench_sampling_measures_every_sampler() -> None:
    text = run("bench_sampling.py", "--vocab-sizes", 512, "--rows", 4, "--threads", 1, "--rounds", 3)
    assert "vocabulary of 512, 4 rows, 1 threads" in text
    for sampler in ("for the CPU", "common", "search", "ours"):
        assert all(numbers(rf"[:,] {sampler} ([\d.]+) ms \(wall ([\d.]+)\)", text))


@pytest.mark.slow
def test_bench_savings_measures_every_variant(run_forked: Callable[..., str]) -> None:
    text = run_forked("bench_savings.py", "--steps", 1, "--dead", 4, "--layers", 1, "--longest", 16, "--threads", 1)
    assert "50% of groups without signal" in text
    for variant in ("stock TRL", "one pass", "and rows", "and padding", "and labels only", "and shifted"):
        assert all(numbers(rf"[:,] {variant} ([\d.]+) s \(([\d.]+)x\)", text))


@pytest.mark.slow
def test_bench_sharding_measures_every_way(run_in_process: Callable[..., str]) -> None:
    text = run_in_process("bench_sharding.py", "--parameters-millions", 1, "--workers", 2)
    rows = cells(text, "2 ")
    assert [row[1] for row in rows] == ["whole", "gathered", "sharded"]
    for row in rows:
        assert int(row[2].split(" / ")[0]) > 0  # MiB written by rank 0
    assert int(rows[2][2].split(" / ")[1]) > 0  # each worker writes its part
    assert len(cells(text, "72B")) == 3


@pytest.mark.slow
def test_bench_startup_splits_the_time_to_the_first_step(policy: Path) -> None:
    text = run("bench_startup.py", f"model.path={policy}", *SMALL_RUN)
    total, cpu = numbers(r"([\d.]+) +([\d.]+)  to the first step", text)
    assert total > 1 and cpu > 1
    phases = [line.split()[:2] for line in text.split("to the first step")[0].splitlines()[1:-1]]
    assert len(phases) > 5 and abs(sum(float(seconds) for seconds, _ in phases) - total) < 1
    assert "ray::RayTrainWorker" in text


@pytest.mark.slow
def test_bench_confinement_compares_both_levels(tmp_path: Path) -> None:
    text = run("bench_confinement.py", "--pairs", 1, "--completions", 2, environment={"TMPDIR": str(tmp_path)})
    for name in ("one call, ms", "2 completions with 2 calls each, s", "the same, CPU s"):
        (row,) = cells(text, name)
        free, confined, ratio = map(float, row[1:])
        assert free > 0 and confined > 0 and ratio > 0


@pytest.mark.slow
def test_bench_sweep_compares_with_full_runs(policy: Path) -> None:
    sizes = ["grpo.max_steps=2", "grpo.save_steps=2", *SMALL_RUN, "--rates", 1e-4, 1e-3, "--rungs", 1]
    text = run("bench_sweep.py", f"model.path={policy}", *sizes)
    sweep, full = numbers(r" +0 +(\d+) s +(\d+) s +\S+ +\S+ +[\d.]+ +-?[\d.]+  True", text)
    assert sweep > 0 and full > 0
    assert numbers(r"the best rate was chosen for (\d) of (\d) seeds", text)[1] == 1


def test_bench_tools_compares_ours_with_stock_trl(run_forked: Callable[..., str]) -> None:
    # Its tools' folders are not among those of the integration tests, which assert that theirs are removed.
    (row,) = cells(run_forked("bench_tools.py", "--pairs", 1, "--steps", 3, "--delays", "0.1 s"), "0.1 s")
    stock, ours, ratio, slowest = map(float, row[1:])
    assert slowest == 0.2  # two calls of a tenth of a second
    assert 0.2 < ours < stock and ratio > 1


def test_bench_watch_measures_the_page_and_its_server() -> None:
    from browser_page import headless_browser

    with headless_browser():  # skips without a browser
        pass
    text = run("bench_watch.py", "--steps", 1000, "--groups", 2, "--refreshes", 2)
    for name in (
        "cold: report with curves visible, s", "warm: page with all views, MB", "after 2 refreshes: server, MiB",
        "after 2 refreshes: page's nodes",
    ):  # fmt: skip
        assert numbers(rf"{name} +([\d.]+)", text)[0] > 0


def test_length_model_describes_its_completions() -> None:
    text = run("length_model.py", "--shape", "tiny", "--lengths", "tiny", "--completions", 64)
    assert numbers(r"(\d+) parameters", text)[0] > 100_000
    mean, deviation = numbers(r"mean (\d+) tokens, deviation ([\d.]+) of it", text)
    assert 5 < mean < 25 and 0.3 < deviation < 1


FORKS = """
import os, pathlib, sys, time

child = os.fork()
if child == 0:
    import grpo_ray.data.ledger
    imported, own = time.time(), f"*pid{os.getpid()}.*"
    while not any(file.stat().st_mtime > imported for file in pathlib.Path(sys.argv[1]).glob(own)):
        time.sleep(0.1)
    time.sleep(1)  # the file is being written
    os._exit(0)
os.waitpid(child, 0)
"""
"""Source of a program whose forked process imports a module and ends without Python's exit."""


@pytest.mark.slow
def test_measure_coverage_counts_subprocesses_and_forks(tmp_path: Path) -> None:
    (program := tmp_path / "forks.py").write_text(FORKS)
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(program)!r}, sys.argv[1]], check=True)"
    text = run("measure_coverage.py", "--keep", tmp_path / "kept", "--", sys.executable, "-c", code, tmp_path / "kept")
    (line,) = [line for line in text.splitlines() if line.startswith("grpo_ray/data/ledger.py")]
    statements, missing = (int(word) for word in line.split()[1:3])
    assert 0 < missing < statements


def test_planted_faults_catches_a_fault(tmp_path: Path) -> None:
    fault, file = "cosine-length-of-right-and-wrong-swapped", tmp_path / "results.json"
    run("planted_faults.py", "--only", fault, "--without-cluster", "--json", file)
    (result,) = json.loads(file.read_text())
    assert result["fault"] == fault and result["caught_by"] == "unit"
    assert result["test"].startswith("tests/unit/rewards/test_length.py::")


def test_mutants_counts_those_that_are_caught(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    # A module with one quick test file; those of most others take minutes.
    text = run("mutants.py", "--only", "text/truncation.py", "--sample", 1, "--json", file)
    results = json.loads(file.read_text())
    assert [result["outcome"] for result in results] == ["caught"]
    assert all(result["detail"].startswith("tests/unit/text/test_truncation.py::") for result in results)
    assert "text/truncation.py: 1 of 1 caught (100%), 0 equivalent" in text


# On a GPU, in tiny sizes on the CPU


def test_bench_gpu_dry_run_measures_our_run_and_learner(tmp_path: Path) -> None:
    text = run("bench_gpu.py", "--dry", "--folder", tmp_path, "--parts", "ours", "learner")
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [outcome["status"] for outcome in outcomes] == ["passed"] * 3  # the model, and what is measured
    rows = cells(text, "tiny, 56 of up to tiny tokens")
    assert [row[1] for row in rows[:3]] == ["all", "half", "14 %"]
    for row in rows[:3]:
        ours, others, learner = row[2:5], row[5:9], row[9]  # the others are TRL, the ratio to it, and the engine alone
        assert "-" not in (*ours, learner) and others == ["-"] * 4
    assert [row[1] for row in rows[3:]] == ["grpo_ray", "learner alone"]


@pytest.mark.slow
def test_bench_gpu_dry_run_measures_every_part(tmp_path: Path) -> None:
    text = run("bench_gpu.py", "--dry", "--folder", tmp_path)
    outcomes = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [outcome["status"] for outcome in outcomes] == ["passed"] * 5  # the model, and what is measured
    rows = cells(text, "tiny, 56 of up to tiny tokens")
    assert [row[1] for row in rows[:3]] == ["all", "half", "14 %"]
    assert not any("-" in row for row in rows[:3])  # nothing is missing
    assert [row[1] for row in rows[3:]] == ["grpo_ray", "TRL", "learner alone"]


def test_gpu_tests_dry_run_passes(tmp_path: Path) -> None:
    text = output_of("tests/gpu/run.py", "--dry", "--folder", str(tmp_path), "--only", "test_packing.py")
    assert "1 of 1 passed" in text
    assert re.findall(r"(\d+) passed", (tmp_path / "probes.log").read_text()) == ["1"]  # no test is skipped


@pytest.mark.slow
def test_gpu_tests_dry_run_of_all_passes(tmp_path: Path) -> None:
    text = output_of("tests/gpu/run.py", "--dry", "--folder", str(tmp_path))
    assert "2 of 2 passed" in text
    passed = [re.findall(r"(\d+) passed", (tmp_path / f"{name}.log").read_text()) for name in ("probes", "runs")]
    assert passed == [["6"], ["9"]]  # no test is skipped
