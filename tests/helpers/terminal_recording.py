"""Recording of a command on a terminal, as an animated SVG file that loads nothing and runs no script.

    python tests/helpers/terminal_recording.py run.svg -- grpo-ray train --example arithmetic

`--kill-at N` kills a worker of the run at step N, as a machine that dies does, so that the recording shows a restart.
"""

import argparse
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import psutil
import pyte
from terminal import Terminal

COLOURS = {
    "default": "#c9d1d9",
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",  # pyte's name of yellow
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#f0f6fc",
    "brightblack": "#8b949e",
}
BACKGROUND = "#0d1117"
CELL = (8.4, 18.0)
"""Width and height of a character at a font size of 14 pixels."""
MARGIN = 16.0
SECONDS_BETWEEN_FRAMES = 0.3
"""Shortest time for which the picture shows a frame."""
LAST_FRAME_SECONDS = 6.0
BOLD = ' class="b"'

Run = tuple[int, str, str, bool]
"""Column, text, colour, bold."""
Row = tuple[Run, ...]


@dataclass(frozen=True)
class Frame:
    """Contents of the screen from one time on."""

    at: float
    """Seconds since the start."""
    rows: tuple[Row, ...]


class DimScreen(pyte.Screen):
    """Screen that shows faint text in grey; pyte ignores that attribute."""

    def select_graphic_rendition(self, *attributes: int, **options: bool) -> None:
        super().select_graphic_rendition(*(90 if each == 2 else each for each in attributes), **options)


def read_rows(screen: pyte.Screen) -> tuple[Row, ...]:
    """Return the rows of a screen as runs of characters of one style."""
    return tuple(tuple(_runs(screen, row)) for row in range(screen.lines))


def _runs(screen: pyte.Screen, row: int) -> Iterator[Run]:
    cells = screen.buffer[row]
    styles = [(cells[column].fg, cells[column].bold) for column in range(screen.columns)]
    for style, columns in groupby(range(screen.columns), key=lambda column: styles[column]):
        place = list(columns)
        if text := "".join(cells[column].data for column in place).rstrip():
            yield place[0], text, COLOURS.get(style[0], COLOURS["default"]), style[1]


def record(command: Sequence[str], columns: int, rows: int, kill_at: int | None) -> list[Frame]:
    """Run a command on a terminal, and return a frame for each change of the screen, four a second at most."""
    frames: list[Frame] = []
    start = time.monotonic()
    screen = DimScreen(columns, rows)
    stream, fed = pyte.ByteStream(screen), 0
    with Terminal(command, columns, rows) as terminal:
        ended = False
        while not ended:
            ended = terminal.process.poll() is not None
            time.sleep(0.25)
            stream.feed(bytes(terminal.output[fed : (fed := len(terminal.output))]))
            if not frames or frames[-1].rows != read_rows(screen):
                frames.append(Frame(time.monotonic() - start, read_rows(screen)))
            if kill_at is not None and any(f" {kill_at}/" in line for line in screen.display):
                kill_worker(terminal.process.pid)
                kill_at = None
    return frames


def kill_worker(driver: int) -> None:
    """Kill one training worker of a driver without warning."""
    workers = [each for each in psutil.Process(driver).children(recursive=True) if "RayTrainWorker" in each.name()]
    os.kill(workers[0].pid, signal.SIGKILL)


def shorten(frames: Sequence[Frame], speed: float) -> tuple[list[Frame], float]:
    """Return the frames that the picture shows, in its time, and its seconds in all.

    Args:
        speed: multiple of the pace in which it happened.
    """
    first, last = frames[0].at, frames[-1]
    shown: list[Frame] = []
    for frame in frames[:-1]:
        at = (frame.at - first) / speed
        if not shown or at - shown[-1].at >= SECONDS_BETWEEN_FRAMES:
            shown.append(Frame(at, frame.rows))
    end = (last.at - first) / speed
    return [*shown, Frame(end, last.rows)], end + LAST_FRAME_SECONDS


def draw(frames: Sequence[Frame], seconds: float, columns: int, rows: int, title: str) -> str:
    """Draw frames as an SVG file in which each row is shown as long as it does not change.

    Where nothing is animated, by the viewer or the reader's choice, it shows the last frame.
    """
    width, height = columns * CELL[0] + 2 * MARGIN, rows * CELL[1] + 2 * MARGIN
    intervals: dict[tuple[int, Row], list[tuple[float, float]]] = defaultdict(list)
    ends = [frame.at for frame in frames[1:]] + [seconds]
    for number in range(rows):
        shown = ((frame.rows[number], frame.at, end) for frame, end in zip(frames, ends, strict=True))
        for row, same in groupby(shown, key=lambda each: each[0]):
            times = list(same)
            if row:
                intervals[number, row].append((times[0][1], times[-1][2]))
    rules: dict[tuple[tuple[str, str], ...], str] = {}
    drawn = []
    for (number, row), spans in intervals.items():
        steps = tuple((_percent(start / seconds), _percent(end / seconds)) for start, end in spans)
        rule = "" if steps == (("0", "100"),) else rules.setdefault(steps, f"k{len(rules)}")
        drawn.append(_draw_row(number, row, f"{rule} s".strip() if spans[-1][1] == seconds else rule))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            "<style>text{font:14px Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}.b{font-weight:bold}",
            "g{visibility:hidden}.s{visibility:visible}@media(prefers-reduced-motion:no-preference){",
            f"[class^=k]{{animation:{seconds:.1f}s step-end infinite}}",
            *(_rule(name, steps) for steps, name in rules.items()),
            "}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{BACKGROUND}"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".")


def _rule(name: str, steps: Sequence[tuple[str, str]]) -> str:
    frames = ["0%{visibility:hidden}"]
    for start, end in steps:
        frames += [f"{start}%{{visibility:visible}}", f"{end}%{{visibility:hidden}}"]
    return f".{name}{{animation-name:{name}}}@keyframes {name}{{{''.join(frames)}}}"


def _draw_row(number: int, row: Row, classes: str) -> str:
    y = MARGIN + (number + 0.75) * CELL[1]
    texts = "".join(
        f'<text x="{MARGIN + column * CELL[0]:.0f}" y="{y:g}" fill="{colour}" textLength="{len(text) * CELL[0]:.0f}"'
        f"{BOLD if bold else ''}>{escape(text)}</text>"
        for column, text, colour, bold in row
    )
    return f'<g class="{classes}">{texts}</g>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="SVG file to write")
    parser.add_argument("command", nargs="+", help="program and arguments")
    parser.add_argument("--size", type=int, nargs=2, default=(100, 26), help="columns and rows")
    parser.add_argument("--speed", type=float, default=5.0, help="multiple of the pace in which it happened")
    parser.add_argument("--kill-at", type=int, help="kill a worker at this step")
    options = parser.parse_args()
    columns, rows = options.size
    frames = record(options.command, columns, rows, options.kill_at)
    shown, seconds = shorten(frames, options.speed)
    options.file.write_text(draw(shown, seconds, columns, rows, " ".join(options.command)), encoding="utf-8")


if __name__ == "__main__":
    main()
