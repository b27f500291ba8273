#!/usr/bin/env bash
# The check on a GPU, in one command and within eight minutes: the tests marked gpu, then the measurements.
# Needs no network and no installation: plain python3 with torch, Triton and pytest. Every wait is bounded.
# Exit code: 0 all passed and measured, 1 not all, 2 something that it needs is missing (said in one line).
set -u
cd "$(dirname "$0")/.." || exit 2
root=$PWD
python=$(command -v "${PYTHON:-python3}") || { echo "make gpu: no ${PYTHON:-python3} here" >&2; exit 2; }
results=$(realpath -m "${RESULTS:-bench/results}")
# Not resolved: a link into a virtual environment is what makes it one.
[[ $python == /* ]] || python=$root/$python
# Seconds at most: kernel tests side by side, tests of PEs that wait for one another, then the measurements,
# of which those that do not fit are listed as not measured. Together less than eight minutes.
kernels_s=${KERNELS_S:-140} pes_s=${PES_S:-140} measure_s=${MEASURE_S:-150}

"$python" - <<'PYTHON' || exit 2
import importlib.util, shutil, sys
lacks = [name for name in ("torch", "triton", "pytest", "numpy") if importlib.util.find_spec(name) is None]
if lacks:
    sys.exit(f"make gpu: {sys.executable} lacks {', '.join(lacks)}; choose another with PYTHON=...")
import torch
if not torch.cuda.is_available():
    sys.exit(f"make gpu: no CUDA device that torch {torch.__version__} can use")
if torch.cuda.get_device_capability() < (8, 0):
    sys.exit(f"make gpu: {torch.cuda.get_device_name()} is older than compute capability 8.0")
if not (shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
    sys.exit("make gpu: no C compiler, which Triton needs to launch kernels")
PYTHON

# Everything where an installation would put it: ops/, graph/ and schedules/ lie inside the package.
tree=$(mktemp -d) || exit 2
trap 'rm -rf "$tree"' EXIT
cp -r "$root/lancet_kernels" "$root/tests" "$root/bench" "$root/pyproject.toml" "$tree/"
cp -r "$root/ops" "$root/graph" "$root/schedules" "$tree/lancet_kernels/"
cd "$tree" || exit 2
export PYTHONPATH=$tree PYTHONDONTWRITEBYTECODE=1
unset TRITON_INTERPRET
LANCET_COMMIT=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
git -C "$root" diff --quiet HEAD -- 2>/dev/null || LANCET_COMMIT+="+changes"
export LANCET_COMMIT

failed=0
pytest=("$python" -m pytest -q -p no:cacheprovider -m "gpu and not long")
together=tests/lancet_kernels/kernels/test_virtual_pes.py

# Most of the time of kernel tests is compiling, so several processes share them.
shards=$(($(nproc) / 2)) && shards=$((shards < 1 ? 1 : shards > 8 ? 8 : shards))
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; rm -rf "$tree"' EXIT
for ((i = 0; i < shards; i++)); do
  timeout --kill-after=10 "$kernels_s" "${pytest[@]}" --shard "$i/$shards" --ignore "$together" tests \
    >"$tree/shard-$i.log" 2>&1 &
  pids+=($!)
done
for ((i = 0; i < shards; i++)); do
  lines=1
  wait "${pids[$i]}" || { failed=1 lines=60; }
  echo "kernel tests, process $((i + 1)) of $shards: $(tail -n $lines "$tree/shard-$i.log")"
done
grep -h '^SKIPPED' "$tree"/shard-*.log | sort -u
pids=()

# While a kernel spins, loading a module or sharing a hardware queue with it would wait for it.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
timeout --kill-after=10 "$pes_s" "${pytest[@]}" "$together" || failed=1

name=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
timeout --kill-after=10 $((measure_s + 40)) "$python" bench/gpu_measure.py --budget-s "$measure_s" \
  --out "$results/gpu-$name-$(date -u +%Y-%m-%d).json" || failed=1
[ "$failed" = 0 ] || echo "make gpu: not all passed, or not all was measured: see above"
exit "$failed"
