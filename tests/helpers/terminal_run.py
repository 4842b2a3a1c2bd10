"""Display of a recorded run, as a program that tests start on a terminal: `python terminal_run.py RUN FOLDER`.

Files in FOLDER control it: it takes the run's steps up to the number in `until`, and ends when there is `end`. It
counts the steps taken in `steps`, and writes `ended` as its last act.
"""

import sys
import time
from pathlib import Path

from replay import Replay

from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.resilience.hangup import survives_hangup


class Stop:
    """Coordinator that only takes note of a request to stop."""

    def __init__(self) -> None:
        self.requested = False
        self.request_stop = self

    def remote(self) -> None:
        self.requested = True


def main(run: str, folder: Path, handles_signals: bool) -> None:
    replay, stop = Replay.of(run), Stop()
    with (
        survives_hangup(),
        ProgressLine(replay.config["grpo"]["max_steps"], name=replay.config["run"]["name"], workers=2) as progress,
    ):
        if handles_signals:
            from grpo_ray.resilience.signals import StopSignals

            StopSignals(stop, progress.notice, lambda: True).install()
        feed = RunFeed([progress])
        for call in replay.calls():
            if call.method == "step":
                step = call.arguments[0]["step"]
                while not (folder / "end").exists() and step > int((folder / "until").read_text()):
                    time.sleep(0.01)
                (folder / "steps").write_text(str(step))
            getattr(feed, call.method)(*call.arguments)
            if stop.requested:
                break
        while not stop.requested and not (folder / "end").exists():
            time.sleep(0.01)
    (folder / "ended").write_text("stopped" if stop.requested else "finished")
    print("the program has ended")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--signals" in sys.argv[3:])
