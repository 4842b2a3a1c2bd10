"""Evaluate a checkpoint on held-out problems: pass@1, pass@k and maj@k with confidence intervals.

On this machine:   python jobs/evaluate.py ~/grpo_ray_runs/arithmetic/checkpoint-000100 --num-samples 8
On a cluster:      ray job submit --address http://127.0.0.1:8265 --working-dir . \
                       --runtime-env jobs/runtime_env.yaml -- \
                       python jobs/evaluate.py s3://bucket/runs/deepmath/checkpoint-000500 \
                       --config grpo_ray/examples/configs/deepmath-qwen2.5-0.5b.yaml
"""

import sys

from grpo_ray.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
