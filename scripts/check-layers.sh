#!/usr/bin/env bash
# Lists #includes that go upward between the folders of src/ (docs/architecture.md) and fails if there is
# one. Also fails on CUDA headers outside .cu files and the files that wrap them.
set -euo pipefail
cd "$(dirname "$0")/.."
# folder: the folders it may include from
declare -A sees=(
  [base]="base"
  [tensor]="base tensor"
  [hopper]="base tensor hopper"
  [ops]="base tensor hopper ops"
  [formats]="base tensor formats"
  [text]="base text"
  [media]="base media"
  [model]="base tensor ops formats model"
  [engine]="base tensor ops formats model text media engine"
  [train]="base tensor ops formats model text media train"
  [server]="base tensor ops formats model text media engine server"
  [verify]="base tensor ops formats model text media engine train verify"
  [cli]="base tensor ops formats model text media engine train server verify cli"
)
failed=0
for folder in "${!sees[@]}"; do
  [[ -d src/$folder ]] || continue
  while IFS=: read -r file line include; do
    target=$(sed -E 's/.*#include "([a-z_0-9]+)\/.*/\1/' <<<"$include")
    [[ -d src/$target ]] || continue
    if [[ " ${sees[$folder]} " != *" $target "* ]]; then
      echo "$file:$line: $folder must not see $target: $include"
      failed=1
    fi
  done < <(grep -rnE '^#include "[a-z_0-9]+/' "src/$folder" --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' || true)
done
# CUDA headers belong into .cu and .cuh files, GPU tests, and the headers that wrap them.
if grep -rnE '^#include <cuda' src --include='*.h' --include='*.cpp' |
    grep -vE '^src/(tensor/cuda_check|hopper/tensor_map)\.h:|_cuda_test\.cpp:'; then
  echo "CUDA headers outside of CUDA files"
  failed=1
fi
exit $failed
