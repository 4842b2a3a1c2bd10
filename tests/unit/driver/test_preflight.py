"""Checks before a run goes on: the same settings and the same training problems."""

from pathlib import Path

import pytest
import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver.preflight import _compare, check_same_run
from grpo_ray.errors import ConfigError
from grpo_ray.storage.checkpoints import SNAPSHOT
from grpo_ray.storage.run_folder import RunFolder


@pytest.mark.parametrize(
    "changed",
    [
        "run.seed=1", "grpo.prompts_per_step=2", "grpo.num_generations=2", "data.train=gsm8k", "data.limit=5",
        "model.path=other", "cluster.shard_learner=true",
    ],
)  # fmt: skip
def test_check_same_run_changed_field_raises(changed: str, tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    (tmp_path / "run").mkdir()
    begun = ["run.name=run", "grpo.save_steps=2"]
    folder.write_text(yaml.safe_dump(load_config(None, begun).to_dict()), "config.yaml")
    check_same_run(load_config(None, [*begun, changed]), folder)  # no checkpoint yet, so nothing can contradict
    folder.write_text("{}", SNAPSHOT)
    check_same_run(load_config(None, [*begun, "grpo.max_steps=7"]), folder)
    with pytest.raises(ConfigError, match=changed.partition("=")[0].replace(".", r"\.")):
        check_same_run(load_config(None, [*begun, changed]), folder)


def test_compare_same_count_of_other_problems_raises() -> None:
    was, now = DatasetFingerprint.of(["a", "b"]), DatasetFingerprint.of(["a", "c"])
    _compare(load_config(), was, was, "run")
    with pytest.raises(ConfigError, match="2 problems as before, but not the same ones"):
        _compare(load_config(), was, now, "run")
    with pytest.raises(ConfigError, match="3 problems where there were 2"):
        _compare(load_config(), was, DatasetFingerprint.of(["a", "b", "c"]), "run")
