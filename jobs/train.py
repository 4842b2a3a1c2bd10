"""Train a policy with GRPO, or go on with a run: the job that a cluster runs.

On this machine:   python jobs/train.py jobs/configs/arithmetic.yaml
On a cluster:      ray job submit --address http://127.0.0.1:8265 --working-dir . \
                       --runtime-env jobs/runtime_env.yaml -- \
                       python jobs/train.py jobs/configs/deepmath-qwen2.5-0.5b.yaml run.storage_path=/mnt/shared/runs

Each YAML says in its head what hardware it wants, how long it takes and what reward to expect. Any field can be
overridden behind it: section.field=value. The same command again goes on from where the run was.
"""

import sys

from grpo_ray.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
