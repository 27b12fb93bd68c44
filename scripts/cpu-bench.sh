#!/bin/sh
# Runs the CPU benchmarks of docs/benchmarks.md one after another on an idle machine, pinned to some of its cores,
# and writes one JSON file each into a folder.
#   scripts/cpu-bench.sh [M3] [OUT] [CORES] [ALL_THREADS]
#     M3     the program                   (default build/hopper/m3)
#     OUT    folder for the results        (default benchmarks/results/cpu)
#     CORES  for taskset, one a thread     (default 0,1; hyperthreads of one core are a poor choice: see lscpu -e)
#     ALL_THREADS  if given: also the whole prefill of 102,400 tokens, sparse and full, on so many threads of all cores
# It took about nine minutes on two cores with AVX-512 BF16, without the training line.
set -eu
m3=${1:-build/hopper/m3} out=${2:-benchmarks/results/cpu} cores=${3:-0,1}
root=$(cd "$(dirname "$0")/.." && pwd)
threads=$(echo "$cores" | tr ',' '\n' | wc -l)
mkdir -p "$out"

bench() {  # NAME ARGUMENTS...
  name=$1
  shift
  echo "== $name: m3 bench $*"
  taskset -c "$cores" "$m3" bench "$@" --threads "$threads" --json "$out/$name.json"
}

bench cpu_msa_prefill msa --context 8192,32768 --attention msa,full --runs 1
bench cpu_msa_decode msa --context 32768,131072,1048576 --new 1 --attention msa,full
bench cpu_msa_train_8k msa-train --context 8192 --rounds 3
bench cpu_msa_100k_chunk msa --context 102400 --new 2048 --attention msa,full,window,dsa --runs 1
bench cpu_msa_100k_decode msa --context 102400 --new 1 --attention msa,full,window,dsa
config=$root/benchmarks/workloads/cpu_270m_config.json
bench cpu_270m_short model "$config" --prompt 512,4096 --decode-at 0,4096 --runs 3
bench cpu_270m_long model "$config" --prompt 16384,32768 --decode-at 16384,32768 --runs 1
if [ $# -ge 4 ]; then
  "$m3" bench msa --context 102400 --attention msa,full --runs 1 --threads "$4" --json "$out/cpu_msa_100k_prefill.json"
fi
