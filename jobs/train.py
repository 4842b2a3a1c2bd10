"""Start or resume a GRPO run described by a YAML file.

On this machine:   python jobs/train.py jobs/configs/arithmetic.yaml
On a cluster:      ray job submit --address http://127.0.0.1:8265 --working-dir . \
                       --runtime-env jobs/runtime_env.yaml -- \
                       python jobs/train.py jobs/configs/deepmath-qwen2.5-0.5b.yaml run.storage_path=/mnt/shared/runs

The head of each YAML in jobs/configs lists hardware, time and expected reward. Every field can be overridden after the
file name, as section.field=value (docs/configuration.md). Repeating the command resumes the run.
"""

import sys

from grpo_ray.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
