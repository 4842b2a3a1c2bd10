"""The config that a run was launched with, from its folder."""

from typing import Any

from grpo_ray.config.recorded import RECORDED_CONFIG, parse_recorded
from grpo_ray.storage.run_folder import RunFolder


def read_recorded(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Read `config.yaml` of a run folder: section -> fields, as recorded.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: it cannot be read.
    """
    return parse_recorded(folder.read_bytes(RECORDED_CONFIG), folder.uri_of(RECORDED_CONFIG))
