#!/bin/bash
# Everything that needs a GPU, in one run: device tests, compute-sanitizer on small cases, benchmarks.
#   scripts/gpu-check.sh BUILD_DIR OUT_DIR [test|sanitize|bench ...]     default: all three
# BUILD_DIR is a build of the preset 'hopper' (it may come from another machine; LD_LIBRARY_PATH then names
# the folder of the shared libraries it was linked with). Logs and JSON lines go to OUT_DIR. Exit code 1 if
# a test or the sanitizer found something. Clocks and other settings of the card are left alone.
set -u
build=${1:?build folder}
out=${2:?output folder}
shift 2
steps=${*:-test sanitize bench}
mkdir -p "$out"
failed=0

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader | tee "$out/gpu.txt"

# limit name command...: output to a log, one line here
step() {
  local limit=$1 name=$2
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  local code=$?
  printf '%-28s %s\n' "$name" "$([ $code -eq 0 ] && echo ok || echo "FAILED ($code)")"
  if [ $code -ne 0 ]; then
    failed=1
    tail -5 "$out/$name.log" | cut -c1-200
  fi
}

ops=$build/src/ops
for what in $steps; do
  case $what in
    test)
      # One process per test of the PTX layer: an illegal instruction must not hide the others.
      for t in $("$build/src/hopper/test_hopper_cuda" --gtest_list_tests | awk '/^[A-Z].*\.$/{s=$1} /^  /{print s $1}'); do
        step 30 "hopper_$t" "$build/src/hopper/test_hopper_cuda" --gtest_brief=1 --gtest_filter="$t"
      done
      for t in "$ops"/test_*_cuda; do
        step 240 "$(basename "$t")" "$t" --gtest_brief=1
      done ;;
    sanitize)
      for tool in memcheck racecheck initcheck; do
        step 120 "attend_$tool" compute-sanitizer --tool $tool --error-exitcode 1 \
          "$ops/test_attend_cuda" --gtest_brief=1 --gtest_filter='AttendCuda.short*'
        step 120 "index_select_$tool" compute-sanitizer --tool $tool --error-exitcode 1 \
          "$ops/test_index_select_cuda" --gtest_brief=1 --gtest_filter='IndexSelectCuda.operator*'
      done ;;
    bench)
      step 300 msa_prefill "$build/benchmarks/bench_cuda_msa_prefill" --rounds 20
      step 300 msa_decode "$build/benchmarks/bench_cuda_msa_decode" --rounds 20
      ;;
  esac
done
exit $failed
