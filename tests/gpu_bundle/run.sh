#!/usr/bin/env bash
# Runs the bundle on a GPU machine that has Python with torch, and neither Rust nor a network.
#
#   ./run.sh [support|rust|python|soak|sanitize|demo|bench|rust-bench|all]...
#                                            (all but soak and sanitize when none is named)
#
# WORKERS sets the processes of pytest (one per core and 10 GiB of GPU memory, 12 at most) and of sanitize; PYTEST_ARGS,
# SOAK_ARGS and BENCH_ARGS add options to theirs; TOOLS names the sanitizer's.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}

if [ ! -d site/ferromla ]; then
  "$python" -m pip install --quiet --no-deps --no-index --no-compile --target site ./*.whl
fi
export PYTHONPATH="$PWD/site${PYTHONPATH:+:$PYTHONPATH}"

support() { "$python" -m ferromla; }

rust() {
  local program
  for program in rust-test/*; do
    echo "== $program"
    "$program" --quiet --include-ignored
  done
}

# As many processes of pytest as there are cores and 10 GiB of GPU memory, 12 at most.
workers() {
  local most=12 memory limit
  memory=$(nvidia-smi -i 0 --query-gpu=memory.total --format=csv,noheader,nounits)
  for limit in "$(nproc)" "$((memory / 10240))"; do most=$((limit < most ? limit : most)); done
  echo "$((most > 0 ? most : 1))"
}

python() {
  # shellcheck disable=SC2086 # several options
  "$python" -m pytest -q -m gpu -n "${WORKERS:-$(workers)}" --dist worksteal \
    --timeout-method=thread ${PYTEST_ARGS:-}
}

# Each tool by several processes, which share the cases: most of its time is the host's. Ends with the first fault.
sanitize() {
  local tool shard shards=${WORKERS:-$(nproc)} processes
  for tool in ${TOOLS:-memcheck racecheck synccheck}; do
    echo "== compute-sanitizer --tool $tool"
    processes=()
    for ((shard = 0; shard < shards; shard++)); do
      compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" tests/python/sanitizer_grid.py "$shard" "$shards" &
      processes+=($!)
    done
    for shard in "${processes[@]}"; do wait "$shard"; done
  done
}

demo() { "$python" examples/demo.py; }

# shellcheck disable=SC2086 # several options
soak() { "$python" tests/python/soak.py ${SOAK_ARGS:-}; }

# shellcheck disable=SC2086 # several options
bench() { "$python" benches/bench.py --markdown --json bench.json ${BENCH_ARGS:-}; }

rust-bench() {
  local program
  for program in rust-bench/*; do
    echo "== $program"
    "$program" --bench
  done
}

if [ $# -eq 0 ] || [ "$1" = all ]; then
  set -- support rust python demo bench rust-bench
fi
for step in "$@"; do
  "$step"
done
