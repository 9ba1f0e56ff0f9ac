#!/usr/bin/env bash
# Builds the CUDA kernels for this machine's GPU, tests them, and measures them, in 10 minutes.
#
#   scripts/gpu_check.sh [--module FILE] [--dry-run] [RESULTS]
#
# RESULTS (benchmarks/results; of a dry run build/gpu-check/results) receives <gpu>.log, with the
# output of every stage, and the benchmarks' <gpu>.json and <gpu>.txt, at the end or when it is
# stopped. The status is 0 if every stage succeeded; a stage that fails does not stop those after
# it. Tests that are all skipped, and benchmarks without the comparison with torch, fail.
# Nothing is downloaded or installed, and what is installed is neither used nor changed.
#
#   --module FILE  a compiled module (_C*.so) to check, instead of building one
#   --dry-run      without a GPU: every stage on the CPU, whatever that proves; wants --module
#
# From the environment: PYTHON, its command; CUDACXX, nvcc; ADAPMIXED_CHECK_SECONDS for everything
# together; ADAPMIXED_COMMIT, the commit of sources without git.
set -euo pipefail

module=''
dry=false
results=''
while (($#)); do
  case $1 in
    --module) module=$(realpath "${2:?--module wants a file}"); shift ;;
    --dry-run) dry=true ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) results=$(realpath -m "$1") ;;
  esac
  shift
done
if $dry && [[ -z $module ]]; then
  echo "--dry-run wants --module: it does not build" >&2
  exit 2
fi

cd "$(dirname "$0")/.."
root=$PWD
work=$root/build/gpu-check
if [[ -z $results ]]; then
  if $dry; then results=$work/results; else results=$root/benchmarks/results; fi
fi
budget=${ADAPMIXED_CHECK_SECONDS:-570}
python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}: set PYTHON" >&2; exit 2; }
# cmake and ninja may be installed beside Python.
export PATH=${python%/*}:$PATH:/usr/local/cuda/bin
export PYTHONUNBUFFERED=1
stages=$work/stages
site=$work/site
# Until the end, so that the checkout stays as it is while its state is noted.
made=$work/made
rm -rf "$stages" "$site" "$made"
mkdir -p "$stages" "$site/adapmixed_ext" "$made" "$results"
names=()

say() { echo "$*" | tee -a "$made/$gpu.log"; }
# What the stages said.
tell_stages() {
  local name
  for name in "${names[@]}"; do
    printf '\n===== %s\n' "$name"
    cat "$stages/$name.log" 2>/dev/null || echo 'not begun'
  done >>"$made/$gpu.log"
}

told=false
# Ends what runs, each stage's whole process group, and leaves what there is.
leave() {
  local file groups=() group
  trap '' INT TERM HUP
  kill $(jobs -p) 2>/dev/null || true
  for file in "$stages"/*.group; do
    if [[ -f $file ]]; then groups+=("$(<"$file")"); fi
  done
  for group in "${groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
  if ! $told; then
    tell_stages
    say "stopped after $SECONDS s"
  fi
  for file in "$made"/*; do
    if [[ -f $file ]]; then cp "$file" "$results/"; fi
  done
  if ((${#groups[@]} > 0)); then
    sleep 2
    for group in "${groups[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
  fi
}

# What the stages need: two lines, the GPU's name and its architecture, or what is missing.
facts=$(DRY=$dry MODULE=$module "$python" scripts/gpu_facts.py) || exit 2
mapfile -t facts <<<"$facts"
gpu=${facts[0]} architecture=${facts[1]}
trap leave EXIT
trap 'exit 130' INT TERM HUP
say "$(date -u '+%Y-%m-%d %H:%M:%S') UTC: $gpu, architecture $architecture, $python"

# run NAME LIMIT COMMAND...: one stage, of at most LIMIT seconds and of what is left of the budget.
run() {
  local name=$1 limit=$2 status=0 start=$SECONDS
  shift 2
  ((limit <= budget - SECONDS)) || limit=$((budget - SECONDS))
  if ((limit < 5)); then
    echo "not run: the time was over" >"$stages/$name.log"
    status=124
  else
    # Not in the foreground, where no trap would run before its end. timeout leads a group.
    timeout --kill-after=10 "$limit" "$@" >"$stages/$name.log" 2>&1 &
    echo $! >"$stages/$name.group"
    wait $! || status=$?
    rm -f "$stages/$name.group"
  fi
  # Where all tests are skipped pytest is content. Without a GPU that is what a dry run has.
  if [[ $name == tests-* && $status == 0 ]] && ! $dry &&
    ! grep -qE '^=+ .*\b[1-9][0-9]* passed' "$stages/$name.log"; then
    echo 'no test was run' >>"$stages/$name.log"
    status=5
  fi
  if [[ $name == tests-* && $status == 5 ]] && $dry; then status=0; fi
  echo "$status $((SECONDS - start))" >"$stages/$name.status"
  echo "  $name: status $status, $((SECONDS - start)) s"
}

stage() {
  names+=("$1")
  run "$@"
}

# As stage, beside others, as many as there are cores.
jobs_at_once=$(nproc)
beside() {
  names+=("$1")
  while (($(jobs -rp | wc -l) >= jobs_at_once)); do wait -n || true; done
  run "$@" &
}

# Writes the log and the table of stages, and ends.
finish() {
  local name status seconds failed=0
  wait
  tell_stages
  told=true
  say ''
  say "$(printf '%-34s%8s%9s' stage status seconds)"
  for name in "${names[@]}"; do
    read -r status seconds <"$stages/$name.status"
    say "$(printf '%-34s%8s%9s' "$name" "$status" "$seconds")"
    ((status == 0)) || failed=$((failed + 1))
  done
  say "$failed of ${#names[@]} stages failed, $SECONDS s, results in $results"
  ((failed == 0)) || exit 1
  exit 0
}

if [[ -z $module ]]; then
  stage configure 90 cmake -S . -B "$work/cmake" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DADAPMIXED_CUDA=ON "-DADAPMIXED_CUDA_ARCHITECTURES=$architecture" \
    "-DCMAKE_CUDA_COMPILER=${CUDACXX:-$(command -v nvcc)}" "-DPython_EXECUTABLE=$python" \
    "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)"
  stage build 300 cmake --build "$work/cmake"
  module=$(find "$work/cmake" -maxdepth 1 -name '_C*.so' | head -n 1)
  read -r built _ <"$stages/build.status"
  if ((built != 0)) || [[ -z $module ]]; then
    tail -n 30 "$stages/configure.log" "$stages/build.log"
    finish
  fi
fi

# The packages of this checkout around that module; PYTHONSAFEPATH keeps the checkout's own
# adapmixed_ext, which has another module or none, from being found first.
ln -s "$root"/adapmixed_ext/{*.py,*.pyi,reference} "$site/adapmixed_ext/"
cp "$module" "$site/adapmixed_ext/"
export PYTHONSAFEPATH=1 PYTHONPATH=$site:$root/python:$root

device=cuda
bench=(--device cuda --out "$made/$gpu")
if $dry; then
  device=cpu
  bench+=(--dry-run --quick)
fi
cases=("$python" tests/cuda/sanitizer_cases.py --device "$device")
stage import 60 "$python" -c "
import sys, adapmixed_ext
print(adapmixed_ext.__file__, adapmixed_ext.build_info())
assert adapmixed_ext.__file__.startswith('$site'), 'another adapmixed_ext was imported'
assert adapmixed_ext.build_info()['cuda'], 'the module has no CUDA kernels'
"
stage smoke 90 "${cases[@]}"

# Tests and sanitizers do not measure time: all at once, each with few threads.
given_threads=${OMP_NUM_THREADS:-}
export OMP_NUM_THREADS=2
pytest=("$python" -m pytest -v --tb=short -p no:cacheprovider -o faulthandler_timeout=120)
for file in tests/cuda/test_*.py; do
  # What is there to be tested where there is no GPU.
  if [[ $file == */test_without_gpu.py ]] && ! $dry; then continue; fi
  beside "tests-cuda-$(basename "$file" .py)" 180 "${pytest[@]}" "$file"
done
while read -r file; do
  if grep -q 'hypothesis' "$file" && ! "$python" -c 'import hypothesis' 2>/dev/null; then
    say "not run: $file wants hypothesis"
    continue
  fi
  beside "tests-$(basename "$file" .py)" 180 "${pytest[@]}" -k cuda "$file"
done < <(grep -lE 'device: torch\.device[,)]' tests/kernels/test_*.py)

# Only our kernels where torch's are known for harmless reports; but whether memory was written
# before it is read is known only if all writes are seen.
only_ours=(--kernel-name kns=adapmixed)
sanitizer_help=$(compute-sanitizer --help 2>/dev/null || true)
if [[ $sanitizer_help != *'--kernel-name '* ]]; then  # older versions
  only_ours=(--kernel-regex kns=adapmixed)
fi
for tool in memcheck racecheck initcheck synccheck; do
  command=(compute-sanitizer --tool "$tool" --error-exitcode 99 --target-processes all
    --print-limit 20)
  case $tool in
    memcheck) command+=(--report-api-errors no) ;;  # torch probes for what may not be there
    racecheck | synccheck) command+=("${only_ours[@]}") ;;
  esac
  if $dry; then command=(); fi
  # Without torch's cache every tensor is an allocation of its own.
  beside "sanitizer-$tool" 200 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${command[@]}" "${cases[@]}"
done
wait

if [[ -n $given_threads ]]; then export OMP_NUM_THREADS=$given_threads; else unset OMP_NUM_THREADS; fi
left=$((budget - SECONDS))
# Compiling a contestant, once begun, may take a minute.
stage benchmarks "$((left > 5 ? left : 5))" "$python" -m benchmarks.operators "${bench[@]}" \
  --seconds "$((left > 120 ? left - 75 : left / 2))"
finish
