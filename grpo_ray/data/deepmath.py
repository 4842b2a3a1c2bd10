"""DeepMath-103K: 103,022 hard math problems with verifiable answers (arXiv 2504.11456).

Read from the hub's parquet files, row group by row group; nothing loads the whole of it. Its rows have the shape
that all of grpo_ray takes: `prompt` (chat messages) and `solution` (LaTeX, or a bare Yes, No, True, False).
"""

from collections.abc import Mapping

from grpo_ray.data.files import FileShard, file_shards

HUB_ID = "trl-lib/DeepMath-103K"


def deepmath(columns: Mapping[str, str] | None = None, system_prompt: str | None = None) -> list[FileShard]:
    """The shards of DeepMath's training split."""
    return hub_shards(HUB_ID, columns, system_prompt)


def hub_shards(
    hub_id: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[FileShard]:
    """The shards of a hub dataset's training split, from the parquet files of its `data/` folder.

    Takes the token of `HF_TOKEN` or `hf auth login` for gated datasets, as the hub's own client does.
    """
    return file_shards(f"hf://datasets/{hub_id}/data/train-*.parquet", columns, system_prompt)
