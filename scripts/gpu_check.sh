#!/usr/bin/env bash
# Builds the CUDA kernels for this machine's GPU, measures and tests them, in parts of 10 minutes.
#
#   scripts/gpu_check.sh [--part PART] [--module FILE] [--dry-run] [RESULTS]
#
#   --part speed    build; bf16 and fp32 at B = 8 and 1, log_pool first; ncu
#          checks   tests, then compute-sanitizer's tools, one after the other
#          compare  the rest of the benchmarks, which compile torch programs to compare with
#          all      these three (the default)
#   --module FILE   a compiled module (_C*.so) to check, instead of building one
#   --dry-run       without a GPU: every stage on the CPU, whatever that proves; without --module it
#                   builds for sm_90. It wants programs named nvidia-smi, compute-sanitizer and ncu
#                   (tests/packaging/stubs)
#
# A part finds what an earlier one has built. RESULTS (benchmarks/results; of a dry run
# build/gpu-check/results) receives, as they come, <gpu>-<part>.log with the output of every stage,
# the benchmarks' .json and .txt, and of `speed` <gpu>-ncu.txt.
#
# The status is 0 if every stage succeeded. A stage that fails does not stop those after it. Tests
# that are all skipped fail, and so does `compare` without the comparison with torch. A sanitizer
# that runs out of time has found nothing so far: that is told, and no failure; nor is ncu, which
# not every machine allows. Nothing is downloaded or installed, and what is installed is neither
# used nor changed.
#
# From the environment: PYTHON, its command; CUDACXX, nvcc; ADAPMIXED_CHECK_SECONDS for a part;
# ADAPMIXED_COMMIT, the commit of sources without git. PYTHONPATH is extended.
set -euo pipefail

part=all
module=''
dry=false
results=''
while (($#)); do
  case $1 in
    --part) part=${2:?--part wants a name}; shift ;;
    --module) module=$(realpath "${2:?--module wants a file}"); shift ;;
    --dry-run) dry=true ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) results=$(realpath -m "$1") ;;
  esac
  shift
done
case $part in
  speed | checks | compare) parts=("$part") ;;
  all) parts=(speed checks compare) ;;
  *) echo "--part $part: it is speed, checks, compare or all" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
root=$PWD
work=$root/build/gpu-check
if [[ -z $results ]]; then
  if $dry; then results=$work/results; else results=$root/benchmarks/results; fi
fi
seconds=${ADAPMIXED_CHECK_SECONDS:-570}
python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}: set PYTHON" >&2; exit 2; }
# cmake and ninja may be installed beside Python.
export PATH=${python%/*}:$PATH:/usr/local/cuda/bin
export PYTHONUNBUFFERED=1
# Known before a result is written, which may lie in the checkout.
ADAPMIXED_COMMIT=${ADAPMIXED_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export ADAPMIXED_COMMIT
stages=$work/stages
site=$work/site
rm -rf "$stages" "$site"
mkdir -p "$stages" "$site/adapmixed_ext" "$results"
names=()
failed=0

say() { echo "$*" | tee -a "$log"; }

ended=false
# Ends what runs, each stage's whole process group. What they said is told.
leave() {
  local name
  trap '' INT TERM HUP
  end_groups TERM
  # A stage that has just begun has a group in a moment, if the shell that begins it lives on.
  if [[ -n $(jobs -rp) ]]; then sleep 2; fi
  kill $(jobs -p) 2>/dev/null || true
  end_groups KILL
  if ! $ended; then
    for name in "${names[@]}"; do
      if [[ ! -f $stages/$name.status ]]; then tell "$name"; fi
    done
    say "stopped after $SECONDS s"
  fi
}

# Sends a signal to the groups of all stages that run.
end_groups() {
  local file
  for file in "$stages"/*.group; do
    if [[ -f $file ]]; then kill "-$1" -- "-$(<"$file")" 2>/dev/null || true; fi
  done
}

# What the stages need: two lines, the GPU's name and its architecture, or what is missing.
facts=$(DRY=$dry MODULE=$module "$python" scripts/gpu_facts.py) || exit 2
mapfile -t facts <<<"$facts"
gpu=${facts[0]} architecture=${facts[1]}
if $dry; then architecture=90-real; fi
log=$results/$gpu-${parts[0]}.log
trap leave EXIT
trap 'exit 130' INT TERM HUP

# Adds what a stage said to the log.
tell() {
  { printf '\n===== %s\n' "$1"; cat "$stages/$1.log" 2>/dev/null || echo 'not begun'; } >>"$log"
}

# run KIND NAME LIMIT COMMAND...: one stage, of at most LIMIT seconds and of what is left of the
# part's. KIND: `must` succeed; `may` fail; `late`: may run out of time.
run() {
  local kind=$1 name=$2 limit=$3 status=0 start=$SECONDS word=''
  shift 3
  ((limit <= until - SECONDS)) || limit=$((until - SECONDS))
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
  if ((status == 0)); then
    word=good
  elif [[ $kind == may ]]; then
    word="not to be had ($status)"
  elif [[ $kind == late && $status =~ ^(124|137)$ ]]; then
    word='no end'
  else
    word="FAILED ($status)"
  fi
  flock "$stages" bash -c "$(declare -f tell); stages='$stages' log='$log'; tell '$name'"
  echo "$word|$((SECONDS - start))" >"$stages/$name.status"
  echo "  $name: $word, $((SECONDS - start)) s"
}

stage() {
  names+=("$2")
  run "$@"
}

# As stage, beside others, as many as there are cores.
jobs_at_once=$(nproc)
beside() {
  names+=("$2")
  while (($(jobs -rp | wc -l) >= jobs_at_once)); do wait -n || true; done
  run "$@" &
}

begin_part() {
  part=$1
  names=()
  log=$results/$gpu-$part.log
  until=$((SECONDS + seconds))
  say "$(date -u '+%Y-%m-%d %H:%M:%S') UTC: part $part, $gpu, architecture $architecture," \
    "$python, commit $ADAPMIXED_COMMIT"
  clocks
}

# Writes the table of stages.
end_part() {
  local name word taken bad=0
  wait
  clocks
  say ''
  say "$(printf '%-34s%18s%9s' stage '' seconds)"
  for name in "${names[@]}"; do
    IFS='|' read -r word taken <"$stages/$name.status"
    say "$(printf '%-34s%18s%9s' "$name" "$word" "$taken")"
    [[ $word != FAILED* ]] || bad=$((bad + 1))
  done
  failed=$((failed + bad))
  say "part $part: $bad of ${#names[@]} stages failed, $SECONDS s, results in $results"
}

end() {
  ended=true
  ((failed == 0)) || exit 1
  exit 0
}

# The clocks and what holds them down.
clocks() {
  nvidia-smi --format=csv --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks_event_reasons.active,power.draw,power.limit,temperature.gpu,memory.used \
    >>"$log" 2>&1 || say 'no nvidia-smi: clocks are not known'
}

device=cuda
small=()
if $dry; then
  device=cpu
  small=(--dry-run)
fi
bench() {
  local name=$1 left
  shift
  left=$((until - SECONDS))
  # Compiling a contestant, once begun, may take a minute.
  stage must "benchmarks-$name" "$((left > 5 ? left : 5))" \
    "$python" -m benchmarks.operators --device cuda --out "$results/$gpu-$name" "${small[@]}" \
    $(if $dry; then echo --quick; fi) \
    --seconds "$((left > 120 ? left - 75 : left > 4 ? left / 2 : 2))" "$@"
}

# Builds, unless there is a module, and sets `site` up.
build() {
  local built
  if [[ -z $module ]]; then
    stage must configure 90 cmake -S . -B "$work/cmake" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DADAPMIXED_CUDA=ON "-DADAPMIXED_CUDA_ARCHITECTURES=$architecture" \
      "-DCMAKE_CUDA_FLAGS=-lineinfo -res-usage" \
      "-DCMAKE_CUDA_COMPILER=${CUDACXX:-$(command -v nvcc)}" "-DPython_EXECUTABLE=$python" \
      "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)"
    stage must build 300 cmake --build "$work/cmake"
    module=$(find "$work/cmake" -maxdepth 1 -name '_C*.so' | head -n 1)
    built=$(<"$stages/build.status")
    if [[ $built != good* || -z $module ]]; then
      tail -n 30 "$stages/configure.log" "$stages/build.log"
      end_part
      end
    fi
  fi
  # The packages of this checkout around that module; PYTHONSAFEPATH keeps the checkout's own
  # adapmixed_ext, which has another module or none, from being found first.
  if [[ ! -e $site/ready ]]; then
    ln -s "$root"/adapmixed_ext/{*.py,*.pyi} "$site/adapmixed_ext/"
    cp "$module" "$site/adapmixed_ext/"
    touch "$site/ready"
    export PYTHONSAFEPATH=1 PYTHONPATH=$site:$root/python:$root${PYTHONPATH:+:$PYTHONPATH}
  fi
  stage must import 60 "$python" -c "
import sys, adapmixed_ext
print(adapmixed_ext.__file__, adapmixed_ext.build_info())
assert adapmixed_ext.__file__.startswith('$site'), 'another adapmixed_ext was imported'
assert $([[ $dry == true ]] && echo True || echo False) or adapmixed_ext.build_info()['cuda'], \
    'the module has no CUDA kernels'
"
}

cases=("$python" tests/cuda/sanitizer_cases.py --device "$device")

speed() {
  begin_part speed
  build
  stage must smoke 90 "${cases[@]}" --few
  # In bf16 at B = 8 first: the machine may be gone at any moment.
  bench speed --only dtypes pools batches members
  # One launch of each kernel and shape.
  stage may ncu 120 ncu --clock-control none --target-processes all --kernel-name-base mangled \
    --kernel-name regex:adapmixed --filter-mode per-launch-config --launch-count 1 \
    --section SpeedOfLight --section Occupancy --section WarpStateStats \
    --section InstructionStats --section MemoryWorkloadAnalysis \
    "${cases[@]}" --few
  cp "$stages/ncu.log" "$results/$gpu-ncu.txt"
  end_part
}

checks() {
  begin_part checks
  build
  local given_threads=${OMP_NUM_THREADS:-} file tool command only_ours sanitizer_help chosen
  # What the bounds of single precision rest on.
  if ! $dry; then
    stage must mufu-build 60 "${CUDACXX:-nvcc}" -O3 -std=c++17 "-arch=sm_${architecture%-real}" \
      benchmarks/mufu.cu -o "$work/mufu"
    stage must mufu 60 "$work/mufu"
    cp "$stages/mufu.log" "$results/$gpu-mufu.txt"
  fi
  # Tests and sanitizers do not measure time: each with few threads.
  export OMP_NUM_THREADS=2
  local pytest=("$python" -m pytest -v --tb=short -p no:cacheprovider -o faulthandler_timeout=120)
  for file in tests/cuda/test_*.py; do
    # What is there to be tested where there is no GPU.
    if [[ $file == */test_without_gpu.py ]] && ! $dry; then continue; fi
    if [[ $file == */test_commands.py ]] && ! "$python" -c 'import peft, dp_accounting' 2>/dev/null
    then
      say "not run: $file wants peft and dp-accounting"
      continue
    fi
    beside must "tests-cuda-$(basename "$file" .py)" 240 "${pytest[@]}" "$file"
  done
  while read -r file; do
    beside must "tests-$(basename "$file" .py)" 240 "${pytest[@]}" -k cuda "$file"
  done < <(grep -lE '\b(device|path): torch\.device([,)]|$)' tests/kernels/test_*.py)
  wait

  # Only our kernels: torch's are known for harmless reports.
  only_ours=(--kernel-name kns=adapmixed)
  sanitizer_help=$(compute-sanitizer --help 2>/dev/null || true)
  if [[ $sanitizer_help != *'--kernel-name '* ]]; then  # older versions
    only_ours=(--kernel-regex kns=adapmixed)
  fi
  for tool in memcheck racecheck synccheck initcheck; do
    command=(compute-sanitizer --tool "$tool" --error-exitcode 99 --target-processes all
      --print-limit 20)
    chosen=(--few)
    case $tool in
      memcheck) command+=(--report-api-errors no) ;;  # torch probes for what may not be there
      *) command+=("${only_ours[@]}") ;;
    esac
    if [[ $tool == initcheck ]]; then chosen+=(--ours-alone); fi
    # Without torch's cache every tensor is an allocation of its own.
    stage late "sanitizer-$tool" 100 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${command[@]}" \
      "${cases[@]}" "${chosen[@]}"
  done
  if [[ -n $given_threads ]]; then export OMP_NUM_THREADS=$given_threads; else unset OMP_NUM_THREADS; fi
  end_part
}

compare() {
  begin_part compare
  build
  bench compare --only operators sizes speed
  stage must generation 240 "$python" -m benchmarks.generation --device "$device" \
    --out "$results/$gpu-generation" $(if $dry; then echo --quick; fi)
  end_part
}

for part in "${parts[@]}"; do "$part"; done
end
