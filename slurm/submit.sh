#!/usr/bin/env bash
# Submits a run to Slurm: an array job with one task per replica group, and a small job for the lighthouse.
# `everstep submit --help` and docs/slurm.md list more options; `everstep submit … --dry-run` prints the commands.
set -euo pipefail

config=llama3_8b.toml          # everstep init llama3_8b writes one
run_dir=/shared/runs/llama3_8b # on a file system that all nodes see; submit again with the same one to continue the run
groups=16                      # replica groups; the run goes on as long as one of them lives
nodes_per_group=1
ranks_per_node=8               # one rank for each GPU of a node

# Flags with a section (--training.steps) are for torchtitan, those without one for sbatch, for the groups' job.
exec everstep submit "$config" --run-dir "$run_dir" --groups "$groups" \
    --nodes-per-group "$nodes_per_group" --ranks-per-node "$ranks_per_node" \
    --lighthouse-flags="--partition=cpu" \
    --partition=gpu --gpus-per-node="$ranks_per_node" --cpus-per-task=32 --time=24:00:00 "$@"
