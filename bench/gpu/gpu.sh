#!/usr/bin/env bash
# The check on a GPU, in one command and within eight minutes: the tests marked gpu, the measurements, and
# with what time is left the sanitizer. Needs no network and no installation: plain python3 with torch,
# Triton and pytest. Every wait is bounded. Last of all a summary; JSON and logs lie in bench/results.
# Peers to compare with are measured where they can be imported, also from the folder PEERS (bench/peers.py says
# how to bring their wheels). Before the sanitizer, two ranks on the one GPU, if that works: bench/gpu/gpu_node.py.
# Exit code: 0 all passed and measured, 1 not all, 2 something that it needs is missing (said in one line).
set -u
cd "$(dirname "$0")/../.." || exit 2
root=$PWD
python=$(command -v "${PYTHON:-python3}") || { echo "make gpu: no ${PYTHON:-python3} here" >&2; exit 2; }
results=$(realpath -m "${RESULTS:-bench/results}")
peers=${PEERS:+$(realpath -m "$PEERS")}
# Not resolved: a link into a virtual environment is what makes it one.
[[ $python == /* ]] || python=$root/$python
# Seconds in all, and at most for each stage: kernel tests side by side, tests that need the GPU for
# themselves, measurements. The sanitizer has the rest. Whoever is interrupted has kill_s to say what it found.
total_s=465 kernels_s=${KERNELS_S:-105} pes_s=${PES_S:-140} measure_s=${MEASURE_S:-160} kill_s=10

device=$(timeout --kill-after=5 60 "$python" - <<'PYTHON'
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
print(torch.cuda.get_device_name().lower().replace(" ", "-").replace("/", "-"))
PYTHON
)
status=$?
((status < 124)) || echo "make gpu: torch did not find its GPU within a minute" >&2
((status == 0)) || exit 2

figures=$results/gpu-$device-$(date -u +%Y-%m-%d).json logs=${figures%.json}.logs
rm -rf "$logs" "$figures"
mkdir -p "$logs" || exit 2

# Everything where an installation would put it: ops/, graph/ and schedules/ lie inside the package.
tree=$(mktemp -d) || exit 2
declare -A running=()
# An interrupted stage ends all that it has started.
trap 'kill -INT "${running[@]}" 2>/dev/null; wait; rm -rf "$tree"' EXIT
cp -r "$root/lancet_kernels" "$root/tests" "$root/bench" "$root/pyproject.toml" "$tree/"
cp -r "$root/ops" "$root/graph" "$root/schedules" "$tree/lancet_kernels/"
cd "$tree" || exit 2
export PYTHONPATH=$tree${peers:+:$peers} PYTHONDONTWRITEBYTECODE=1 COLUMNS=200
unset TRITON_INTERPRET
LANCET_COMMIT=unknown
if [[ -e $root/.git ]] && commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null); then
  LANCET_COMMIT=$commit
  git -C "$root" diff --quiet HEAD -- 2>/dev/null || LANCET_COMMIT+="+changes"
fi
export LANCET_COMMIT

# start NAME SECONDS COMMAND...: beside what runs already; NAME.log is its output.
start() {
  local name=$1 limit=$2
  shift 2
  timeout --signal=INT --kill-after=$kill_s "$limit" "$@" >"$logs/$name.log" 2>&1 &
  running[$name]=$!
}

# finish NAME: wait for it, and note its exit code at the end of its log.
finish() {
  local status
  wait "${running[$1]}"
  status=$?
  unset "running[$1]"
  printf '\nexit code %d\n' "$status" >>"$logs/$1.log"
  echo "$1: exit code $status after $SECONDS s"
}

pytest=("$python" -m pytest -v --color=no -p no:cacheprovider -m "gpu and not long")
# Virtual PEs wait for one another; the others measure times.
alone=(
  tests/lancet_kernels/kernels/test_virtual_pes.py
  tests/graph/costs/test_measure_gpu.py
)
sanitizer=tests/lancet_kernels/kernels/test_sanitizer_gpu.py

# Most of the time of kernel tests is compiling, so several processes share them.
shards=$(($(nproc) / 2)) && shards=$((shards < 1 ? 1 : shards > 8 ? 8 : shards))
for ((i = 1; i <= shards; i++)); do
  start "1-kernels-$i" "$kernels_s" "${pytest[@]}" --shard "$((i - 1))/$shards" \
    "${alone[@]/#/--ignore=}" --ignore="$sanitizer" tests
done
for ((i = 1; i <= shards; i++)); do
  finish "1-kernels-$i"
done

# While a kernel spins, loading a module or sharing a hardware queue with it would wait for it.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
start 2-alone "$pes_s" "${pytest[@]}" "${alone[@]}"
finish 2-alone

start measure "$measure_s" "$python" -m bench.gpu.gpu_measure --budget-s $((measure_s - 15)) --out "$figures"
finish measure

if ((total_s - SECONDS >= 110)); then
  start ranks 60 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.gpu.gpu_node \
    --device one-gpu --out "${figures%.json}-ranks.json"
  finish ranks
  # Not a log of tests. What it says is its first line, or the last error.
  mv "$logs/ranks.log" "$logs/ranks.txt"
  said=$(grep -m 1 "^ranks share a GPU" "$logs/ranks.txt" ||
    grep -E "Error|exit code" "$logs/ranks.txt" | grep -v ChildFailedError | tail -n 2 | head -n 1)
  echo "two ranks on one GPU: $said" >"$logs/ranks-said.txt"
else
  echo "two ranks on one GPU: not run, $((total_s - SECONDS)) s are left" >"$logs/ranks-said.txt"
fi

left_s=$((total_s - SECONDS))
if ((left_s >= 40)); then
  # Its cases end by themselves, a little earlier.
  export SANITIZER_UNTIL=$(($(date +%s) + left_s - 10))
  start 3-sanitizer "$left_s" "${pytest[@]}" "$sanitizer"
  finish 3-sanitizer
else
  echo "sanitizer: not run, $left_s s are left" | tee "$logs/sanitizer-not-run.txt"
fi

"$python" -m bench.gpu.gpu_table "$figures" "$logs" || exit 1
