"""Start or resume a GRPO run described by a YAML file.

On this machine:   python jobs/train.py --example arithmetic
On a cluster:      ray job submit --address http://127.0.0.1:8265 --working-dir . \
                       --runtime-env jobs/runtime_env.yaml -- \
                       python jobs/train.py --example deepmath-qwen2.5-0.5b run.storage_path=/mnt/shared/runs

`--example help` lists the configs of the package; the head of each has time and expected reward. A YAML of your own is
named in its place. Every field can be overridden, as section.field=value (docs/configuration.md). Repeating the command
resumes the run.
"""

import sys

from grpo_ray.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
