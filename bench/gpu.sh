#!/usr/bin/env bash
# The check on a GPU, in one command and within eight minutes: the tests marked gpu, then the measurements.
# Needs no network and no installation: plain python3 with torch, Triton and pytest. Every wait is bounded.
# Exit code: 0 all passed and measured, 1 not all, 2 something that it needs is missing (said in one line).
set -u
cd "$(dirname "$0")/.." || exit 2
root=$PWD
python=${PYTHON:-python3}
results=${RESULTS:-$root/bench/results}
tests_s=${TESTS_S:-240}   # at most so many seconds for the tests,
measure_s=${MEASURE_S:-190} # and then for measurements: what does not fit is listed as not measured.

"$python" - <<'PYTHON' || exit 2
import importlib.util, shutil, sys
lacks = [name for name in ("torch", "triton", "pytest", "numpy") if importlib.util.find_spec(name) is None]
if lacks:
    sys.exit(f"make gpu: {sys.executable} lacks {', '.join(lacks)}; choose another with PYTHON=...") or 2
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
# While a kernel spins, loading a module or sharing a hardware queue with it would wait for it.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
LANCET_COMMIT=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
git -C "$root" diff --quiet HEAD -- 2>/dev/null || LANCET_COMMIT+="+changes"
export LANCET_COMMIT

failed=0
timeout --kill-after=10 "$tests_s" "$python" -m pytest -p no:cacheprovider -q -m "gpu and not long" tests || failed=1

name=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
timeout --kill-after=10 $((measure_s + 40)) "$python" bench/gpu_measure.py --budget-s "$measure_s" \
  --out "$results/gpu-$name-$(date -u +%Y-%m-%d).json" || failed=1
[ "$failed" = 0 ] || echo "make gpu: not all passed or not all was measured, see above"
exit "$failed"
