#!/bin/bash
# One node of an engine, as a task of a step: bash engine.sh ROLE COMPONENT. A SIGTERM drains it.
set -euo pipefail

role=$1 component=$2
leader=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)

exec torchrun --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID" --nproc-per-node "${RANKS_PER_NODE:-8}" \
  --master-addr "$leader" --master-port "$((20000 + (SLURM_JOB_ID * 16 + component) % 20000))" \
  "$HERE/group_engine.py" --role "$role" --key-file "$GROUP/key" --folder "$GROUP/engines" \
  --listen "${LISTEN:-$(hostname -f)}:0" ${NUM_PAGES:+--num-pages "$NUM_PAGES"} "$CHECKPOINT"
