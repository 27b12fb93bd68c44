#!/usr/bin/env bash
# Installs packages, builds everything and runs all tests that need no GPU. Needs Debian 12, root or
# sudo. The parsers are fuzzed by scripts/fuzz.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

step "packages (a minute the first time)"
scripts/install-packages.sh

preset=cpu
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  preset=hopper
else
  echo "no CUDA toolkit found: building the CPU product only (preset cpu)"
fi
step "configure and build, preset $preset (about ten minutes on two cores the first time)"
cmake --preset "$preset" -DM3_WERROR=ON -DM3_REQUIRE_ALL=ON
cmake --build --preset "$preset"

step "unit tests and goldens"
ctest --preset "$preset" -LE cuda -j "$(nproc)"
