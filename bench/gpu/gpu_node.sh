#!/usr/bin/env bash
# The check on a machine with 2 to 8 GPUs, all over NVLink, with torch's symmetric memory: an MoE layer whose
# ranks have another number of tokens in each of 1,000 steps, with stragglers, against the whole layer on one
# device; then what of a step no computation hides. One JSON (RESULTS, default bench/results). Arguments go to
# bench/gpu/gpu_node.py. Exit code: 0 all right, 1 wrong results or a rank failed, 2 there are no 2 GPUs.
set -u
cd "$(dirname "$0")/../.." || exit 2
python=$(command -v "${PYTHON:-python3}") || { echo "gpu_node: no ${PYTHON:-python3} here" >&2; exit 2; }
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if ((gpus < 2)); then
  echo "gpu_node: it needs 2 to 8 GPUs with NVLink, here are $gpus; tiny, on CPUs: torchrun --standalone" \
    "--nproc-per-node 2 -m bench.gpu.gpu_node --device cpu --out node.json" >&2
  exit 2
fi
results=$(realpath -m "${RESULTS:-bench/results}")
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${GPUS:-$((gpus < 8 ? gpus : 8))}" \
  -m bench.gpu.gpu_node --out "$results/gpu-node-$(date -u +%Y-%m-%d).json" "$@"
