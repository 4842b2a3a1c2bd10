"""DeepMath-103K: hard math problems with verifiable answers (arXiv 2504.11456), and hub datasets of the same form.

`trl-lib/DeepMath-103K` has 97,870 training and 5,152 held-out problems. They are read from the hub's parquet files by
row group; the whole dataset is never in memory. Its rows have the form that grpo_ray expects: `prompt` (chat
messages) and `solution` (LaTeX, or a bare Yes, No, True, False).
"""

from collections.abc import Mapping

from grpo_ray.config.sources import HUB_DATASETS, HUB_SPLITS
from grpo_ray.data.files import FileShard, file_shards

HUB_ID = HUB_DATASETS["deepmath"]


def deepmath_shards(
    split: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[FileShard]:
    """Return the shards of DeepMath's training or held-out split."""
    return hub_shards(HUB_ID, split, columns, system_prompt)


def hub_shards(
    hub_id: str, split: str, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[FileShard]:
    """Return the shards of one split of a hub dataset: the row groups of the parquet files in its `data/` folder.

    A gated dataset needs a token, in `HF_TOKEN` or from `hf auth login`, as with the hub's own client.
    """
    return file_shards(f"hf://datasets/{hub_id}/data/{HUB_SPLITS[split]}-*.parquet", columns, system_prompt)
