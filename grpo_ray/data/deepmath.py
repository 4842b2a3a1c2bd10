"""DeepMath-103K: hard math problems with verifiable answers (arXiv 2504.11456), and hub datasets of its kind.

`trl-lib/DeepMath-103K` holds 97,870 problems to train on and 5,152 to measure with. They are read from the hub's
parquet files, row group by row group; nothing loads the whole of it. Its rows have the shape that all of grpo_ray
takes: `prompt` (chat messages) and `solution` (LaTeX, or a bare Yes, No, True, False).
"""

from collections.abc import Mapping

from grpo_ray.data.files import FileShard, file_shards

HUB_ID = "trl-lib/DeepMath-103K"

HUB_SPLITS = {"train": "train", "heldout": "test"}
"""Our split -> how the hub's files of it begin."""


def deepmath(split: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None) -> list[FileShard]:
    """The shards of DeepMath's training or held-out split."""
    return hub_shards(HUB_ID, split, columns, system_prompt)


def hub_shards(
    hub_id: str, split: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[FileShard]:
    """The shards of one split of a hub dataset, from the parquet files of its `data/` folder.

    Takes the token of `HF_TOKEN` or `hf auth login` for gated datasets, as the hub's own client does.
    """
    return file_shards(f"hf://datasets/{hub_id}/data/{HUB_SPLITS[split]}-*.parquet", columns, system_prompt)
