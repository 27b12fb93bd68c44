#!/bin/bash
# Everything that needs a GPU, in one run: device tests, goldens on the device, compute-sanitizer on small
# cases, benchmarks.
#   scripts/gpu-check.sh BUILD_DIR OUT_DIR [test|verify|sanitize|bench ...]     default: all four
# BUILD_DIR is a build of the preset 'hopper' (it may come from another machine; LD_LIBRARY_PATH then names
# the folder of the shared libraries it was linked with). Everything but the benchmarks runs side by side.
# Logs and JSON lines go to OUT_DIR, a summary to OUT_DIR/gpu_check.json. Exit code 1 if a test, a golden or
# the sanitizer found something. Clocks and other settings of the card are left alone.
set -u
build=${1:?build folder}
out=${2:?output folder}
shift 2
steps=${*:-test verify sanitize bench}
logs=$out/logs
rm -rf "$logs"
mkdir -p "$logs"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

# limit name command...: output to a log, one record for the summary
step() {
  local limit=$1 name=$2 start=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$logs/$name.log" 2>&1
  local code=$?
  # Counts that the programs print themselves.
  local passed reports
  passed=$(grep -oE '^\[  PASSED  \] [0-9]+|^[0-9]+ passed' "$logs/$name.log" | grep -oE '[0-9]+' | tail -1)
  reports=$(grep -oE '(ERROR|RACECHECK) SUMMARY: [0-9]+' "$logs/$name.log" | grep -oE '[0-9]+' | tail -1)
  printf '  {"step": "%s", "exit": %d, "passed": %s, "sanitizer_reports": %s, "seconds": %d}\n' "$name" "$code" \
    "${passed:-null}" "${reports:-null}" $((SECONDS - start)) | tee "$logs/$name.json"
  if [ $code -ne 0 ]; then
    touch "$logs/failed"
    grep -E 'FAILED|Failure|rror|========= [A-Z]' "$logs/$name.log" | head -5 | cut -c1-200
  fi
}

# tool name program filter: tests under compute-sanitizer
sanitize() {
  step 200 "$2_$1" compute-sanitizer --tool "$1" --error-exitcode 1 "$3" --gtest_brief=1 --gtest_filter="$4" &
}

ops=$build/src/ops
for what in $steps; do
  case $what in
    test)
      # One process per test of the PTX layer: an illegal instruction must not hide the others.
      for t in $("$build/src/hopper/test_hopper_cuda" --gtest_list_tests | awk '/^[A-Z].*\.$/{s=$1} /^  /{print s $1}'); do
        step 60 "hopper_$t" "$build/src/hopper/test_hopper_cuda" --gtest_brief=1 --gtest_filter="$t"
      done &
      for t in "$ops"/test_*_cuda; do
        step 300 "$(basename "$t")" "$t" --gtest_brief=1 &
      done ;;
    verify)
      step 120 verify_f32 "$build/m3" verify tests/golden/msa --device cuda &
      step 120 verify_bf16 "$build/m3" verify tests/golden/msa --device cuda --dtype bf16 & ;;
    sanitize)
      # Clusters of one CTA in decode: the tool does not follow barrier.cluster (docs/lab/decode.md).
      for tool in memcheck racecheck initcheck; do
        sanitize $tool attend "$ops/test_attend_cuda" 'AttendCuda.small*'
        sanitize $tool attend_decode "$ops/test_attend_cuda" 'Cuda/AttendDecodeCluster.BorderLengths*/0'
        sanitize $tool index_select "$ops/test_index_select_cuda" 'IndexSelectCuda.operator*'
        sanitize $tool index_decode "$ops/test_index_select_cuda" 'IndexKeys8Cuda.*:IndexDecode8Cuda.Scores*'
        sanitize $tool index_prefill8 "$ops/test_index_select_cuda" 'IndexPrefill8Cuda.small*'
        sanitize $tool cache_append "$ops/test_cache_append_cuda" '*'
        sanitize $tool vit_attend "$ops/test_vit_attend_cuda" '*'
      done ;;
    bench)
      wait
      prefill=$build/benchmarks/bench_cuda_msa_prefill decode=$build/benchmarks/bench_cuda_msa_decode
      step 300 msa_prefill "$prefill" --rounds 20 --paths hybrid \
        --only 2048,4096,6144,8192,16384,32768,65536,131072,300+131072,dense:2048,dense:4096,dense:6144,dense:8192,dense:32768
      step 300 msa_prefill_short "$prefill" --rounds 20 --paths tile,hybrid,split \
        --only 40+60000,100+131072,182+17500,300+131072,338+74000,151+140000/176+126000,640+131072,1000+131072
      step 300 msa_prefill_long "$prefill" --rounds 3 --paths hybrid --only 524288,1048576
      step 300 msa_prefill_int8 "$prefill" --rounds 10 --paths hybrid --index8 15,24,32,exact --only 32768,65536,131072
      step 300 msa_prefill_int8_long "$prefill" --rounds 3 --rho 0.99 --paths hybrid --index8 15,24,32,exact \
        --only 524288,1048576
      step 300 msa_prefill_mix "$build/m3" bench msa --device cuda --workload benchmarks/workloads/prefill_shapes.json \
        --rho 0.99 --runs 15 --attention msa --json "$out/msa_prefill_mix.json"
      step 300 msa_decode "$decode" --rounds 20
      step 300 msa_decode_int8 "$decode" --rounds 20 --int8 --only 1x131072,1x1048576,8x131072,8x1048576,64x131072
      step 300 vit_attend "$build/benchmarks/bench_cuda_vit_attend"
      step 300 norm_rope_append "$build/benchmarks/bench_cuda_norm_rope_append"
      ;;
  esac
done
wait

{
  printf '{"command": "scripts/gpu-check.sh BUILD OUT %s", "date": "%s", "device": "%s", "failed": %s, "steps": [\n' \
    "$steps" "$(date -u +%FT%TZ)" "$(nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader | head -1)" \
    "$([ -e "$logs/failed" ] && echo true || echo false)"
  cat "$logs"/*.json | sed '$!s/$/,/'
  printf ']}\n'
} > "$out/gpu_check.json"
[ ! -e "$logs/failed" ]
