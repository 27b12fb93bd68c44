#!/usr/bin/env bash
# Builds libFuzzer targets (preset fuzz: clang, AddressSanitizer, UndefinedBehaviorSanitizer) and runs each for a while.
#   scripts/fuzz.sh [SECONDS_EACH] [TARGET...]     default: 60 seconds, every target
# A crash leaves its input in build/fuzz/findings and fails the script.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
targets=("$@")
scripts/install-packages.sh --fuzz
export CC=clang-14 CXX=clang++-14
cmake --preset fuzz -DCMAKE_C_COMPILER=clang-14 -DCMAKE_CXX_COMPILER=clang++-14 >/dev/null
cmake --build --preset fuzz --target "${targets[@]:-all_fuzzers}"
mkdir -p build/fuzz/findings
mapfile -t fuzzers < <(find build/fuzz/src -name '*_fuzz' -type f -executable |
  grep -E "/($(IFS='|'; echo "${targets[*]:-.*}"))\$" | sort)
((${#fuzzers[@]} > 0)) || { echo "no fuzz target was built" >&2; exit 1; }
run_one() {
  local name seeds=()
  name=$(basename "$1")
  [[ -d tests/fuzz/$name ]] && seeds+=("tests/fuzz/$name")
  mkdir -p "build/fuzz/corpus/$name"
  if "$1" -max_total_time="$2" -rss_limit_mb=2048 -timeout=20 -print_final_stats=1 \
      -artifact_prefix=build/fuzz/findings/"$name"- "build/fuzz/corpus/$name" "${seeds[@]}" \
      >"build/fuzz/$name.log" 2>&1; then
    printf '%-28s %12s inputs, no finding\n' "$name" \
      "$(grep -oE 'number_of_executed_units: [0-9]+' "build/fuzz/$name.log" | grep -oE '[0-9]+')"
  else
    echo "$name found something:"; tail -n 40 "build/fuzz/$name.log"; return 1
  fi
}
export -f run_one
printf '%s\n' "${fuzzers[@]}" | xargs -P "$(nproc)" -I{} bash -c 'run_one {} '"$seconds"
