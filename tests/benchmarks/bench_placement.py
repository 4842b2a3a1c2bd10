"""Colocated against dedicated engines, simulated: `python tests/benchmarks/bench_placement.py`, about two minutes.

First the published comparisons of other systems with the simulation's predictions (`placement_rows.py`), then a table
of the steps that dedicated engines take in the time of one colocated step, by number of GPUs, length and staleness.
Nothing is measured, and no engine is started.
"""

import argparse
import time

from placement_rows import FITTED_ON, NEMO, ROWS, Fit, System, fit_systems, fit_total, predict_alone, predict_rows

from grpo_ray.driver.placement_model.hardware import H100, ModelSize, engine_speed, learner_token_seconds
from grpo_ray.driver.placement_model.learner import LearnerSpeed
from grpo_ray.driver.placement_model.lengths import LogNormalLengths
from grpo_ray.driver.placement_model.placements import Clocked, Workload, clocked_step
from grpo_ray.driver.placement_model.search import compare_placements

MODEL = ModelSize(parameters=7.6e9, active=7.6e9, cache_bytes=57_344)
"""Sizes of Qwen2.5-7B."""
LENGTHS = ((600, 2_048), (2_400, 8_192), (8_000, 32_768))
"""Mean and longest length, tokens."""
GPUS = (8, 32, 128, 512)
STALENESSES = (0, 1, 2, 4)


def table_work(mean: int, longest: int, prompts: int = 512) -> Workload:
    """Return the work of a run of the table: 7B on H100s, 8 completions of each prompt."""
    return Workload(
        draw=LogNormalLengths(groups=prompts, completions=8, mean=mean, longest=longest),
        longest=longest,
        prompt_tokens=200,
        engine=engine_speed(MODEL, H100),
        learner=LearnerSpeed(token_seconds=learner_token_seconds(MODEL, H100), update_seconds=1.0),
        publish_seconds=3.0,
        switch_seconds=1.0,
    )


def published_table(*, is_tiny: bool) -> list[str]:
    """Return the lines of the table of published comparisons."""
    fits: dict[System, Fit] = {"NeMo RL": fit_total(NEMO)} if is_tiny else fit_systems()
    lines = [
        "| system | run | colocated s | dedicated s | predicted s | error | from the fitted row alone s |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in predict_rows(fits, ROWS[9:12] if is_tiny else ROWS):
        row = each.row
        alone = predict_alone(row, fits[row.system])
        both = "-" if alone is None else f"{alone[0]:.0f} → {alone[1]:.0f}"
        mark = " (fitted)" if row in FITTED_ON else ""
        lines.append(
            f"| {row.system} | {row.name}{mark} | {row.colocated:.0f} | {row.dedicated:.0f} | {each.seconds:.0f} "
            f"| {round(100 * each.error):+d} % | {both} |".replace(" +0 %", " 0 %")
        )
    return lines


def gains_table(gpus: tuple[int, ...], lengths: tuple[tuple[int, int], ...], prompts: int) -> list[str]:
    """Return the lines of the table of gains; in parentheses the GPUs of the engines."""
    heads = [f"k = {k}" for k in STALENESSES]
    lines = [
        f"| mean, longest length | GPUs | colocated s | {' | '.join(heads)} | k = 4 by the clock |",
        f"|---|---|---|{'---|' * len(heads)}---|",
    ]
    for mean, longest in lengths:
        for count in gpus:
            work = table_work(mean, longest, prompts)
            found = compare_placements(work, count, STALENESSES)
            assert found is not None
            last = found.dedicated[-1]
            clocked = clocked_step(work, last.engine_gpus, last.learner_gpus, Clocked(staleness=STALENESSES[-1]))
            cells = [f"{found.gain(split):.2f} ({split.engine_gpus})" for split in found.dedicated]
            seconds = found.colocated.seconds
            lines.append(
                f"| {mean:,}, {longest:,} | {count} | {seconds:.0f} | {' | '.join(cells)} | {seconds / clocked:.2f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="some rows and one size, to try the script")
    arguments = parser.parse_args()
    began = time.perf_counter()
    print("\n".join(published_table(is_tiny=arguments.tiny)), flush=True)
    print()
    sizes = ((8,), LENGTHS[:1], 32) if arguments.tiny else (GPUS, LENGTHS, 512)
    print("\n".join(gains_table(*sizes)))
    print(f"\nsimulated in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
