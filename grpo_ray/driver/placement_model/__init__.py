"""Simulation of where engines and learner run: on the same GPUs, or engines on GPUs of their own.

`engine` and `learner` have the durations of their work, `lengths` the completions, `placements` the schedules,
`search` the best split of GPUs, `hardware` durations from a model's sizes, and `advice` the lines of `grpo-ray check`.
Nothing here imports a heavy library.
"""
