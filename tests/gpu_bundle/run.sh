#!/usr/bin/env bash
# Runs the bundle on a GPU machine that has Python with torch, and neither Rust nor a network.
#
#   ./run.sh [support|rust|python|sanitize|demo|bench|rust-bench|all]...   (all but sanitize when none is named)
#
# WORKERS sets the processes of pytest (4), PYTEST_ARGS adds options to it.
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

python() {
  # shellcheck disable=SC2086 # several options
  "$python" -m pytest -q -m gpu -n "${WORKERS:-4}" ${PYTEST_ARGS:-}
}

sanitize() {
  local tool
  for tool in memcheck racecheck synccheck; do
    echo "== compute-sanitizer --tool $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" tests/python/sanitizer_grid.py
  done
}

demo() { "$python" examples/demo.py; }

bench() { "$python" benches/bench_decode.py; }

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
