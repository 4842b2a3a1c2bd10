"""Sweep files of small runs, and what is left of a sweep."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_ray.config.yaml_documents import dump_yaml


def write_sweep(folder: Path, settings: Sequence[str], **sweep: Any) -> Path:
    """Write a base config with these overrides, and a sweep file in the same folder; return the path of the latter."""
    from grpo_ray.config.loader import load_config

    base = folder / "base.yaml"
    base.write_text(dump_yaml(load_config(None, settings).to_dict()))
    path = folder / "rates.yaml"
    path.write_text(dump_yaml({"base": str(base), **sweep}))
    return path


def standings(folder: Path) -> dict[str, str]:
    """Return the standing of each trial in the record of a sweep."""
    records = json.loads((folder / "sweep.json").read_text())["records"]
    return {record["trial"]["name"]: record["standing"] for record in records}


def wait_for_free_cpus(seconds: float = 120.0) -> None:
    """Wait until no process of the cluster holds a CPU or GPU; fail after `seconds`."""
    import ray

    end = time.monotonic() + seconds
    while True:
        total, free = ray.cluster_resources(), ray.available_resources()
        held = {name: total[name] - free.get(name, 0.0) for name in ("CPU", "GPU") if name in total}
        if not any(held.values()):
            return
        assert time.monotonic() < end, f"still held: {held}"
        time.sleep(0.2)


class GroupHolder:
    """Actor that reserves a CPU, as Ray Train's controller does for its workers."""

    def __init__(self) -> None:
        from ray.util.placement_group import placement_group

        self.group = placement_group([{"CPU": 1.0}])

    def hold(self) -> Any:
        """Return the group once it has its CPU."""
        import ray

        ray.get(self.group.ready())
        return self.group
