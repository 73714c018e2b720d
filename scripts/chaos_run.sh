#!/usr/bin/env bash
# Starts a run, breaks it, stops it, reports; with --verify also compares it with a run in which nothing failed.
#     scripts/chaos_run.sh configs/demo.toml --every 15 --for 5m --verify
# Ends with status 0 only if the run kept its promise. --help says what else it takes; faults: everstep chaos --list.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
scripts/setup
exec .venv/bin/python -m everstep.chaos.trial "$@"
