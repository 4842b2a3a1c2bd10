"""Folder of the stages of one YAML: the run folders in it, in order."""

import re

from grpo_ray.errors import DamagedFileError
from grpo_ray.storage.run_folder import RECORD_BYTES, RunFolder

STAGES_FILE = "stages.json"
"""File of the folder of all stages with the names of their run folders, in order."""
POLICIES = "policies"
"""Folder beside the run folders with the exported policies that stages begin with."""
FOLDER_NAME = re.compile(r"\d\d-[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of the run folders of stages."""


def stage_folders(folder: RunFolder) -> list[str]:
    """Return the names of the run folders of stages, in order; empty if the folder is not one of stages.

    Raises:
        DamagedFileError: the list of the stages cannot be read, or the folder holds something that grpo_ray does not
            write.
    """
    if not folder.has_entry(STAGES_FILE):
        return []
    folder.require_plain_files()
    names = folder.read_json(STAGES_FILE, limit=RECORD_BYTES)
    if not isinstance(names, list) or not all(isinstance(each, str) and FOLDER_NAME.fullmatch(each) for each in names):
        raise DamagedFileError(f"{folder.uri_of(STAGES_FILE)} is damaged: it is no list of run folders")
    return [name for name in names if folder.exists(name)]
