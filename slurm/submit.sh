#!/usr/bin/env bash
# Submits a run to Slurm: an array job with one task per replica group, and a small job for the lighthouse.
# `everstep submit --help` and docs/slurm.md say what else it takes; `everstep submit … --dry-run` prints the commands.
set -euo pipefail

config=llama3_8b.toml          # everstep init llama3_8b writes one
run_dir=/shared/runs/llama3_8b # on a file system that all nodes see; the same again continues the run
groups=16                      # replica groups: the run goes on as long as one of them lives
nodes_per_group=1
ranks_per_node=8               # GPUs of a node

# Flags without a section are sbatch's, for the groups' job; those with one (--training.steps) are torchtitan's.
exec everstep submit "$config" --run-dir "$run_dir" --groups "$groups" \
    --nodes-per-group "$nodes_per_group" --ranks-per-node "$ranks_per_node" \
    --lighthouse-flags="--partition=cpu" \
    --partition=gpu --gpus-per-node="$ranks_per_node" --cpus-per-task=32 --time=24:00:00 "$@"
