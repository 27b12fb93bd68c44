#!/usr/bin/env bash
# Trains m3-nano from nothing (docs/training.md): packages, program, corpus, tokenizer, training, model folder, measures. Every part but the measures is
# skipped if it is there already, and training resumes where it stopped, so the script can be started again at any time.
#   scripts/train-nano.sh [SEED] [KEY=VALUE ...]      e.g. scripts/train-nano.sh 1 steps=2000
# In the background: nohup nice scripts/train-nano.sh 0 > train-nano.log 2>&1 &
set -euo pipefail
cd "$(dirname "$0")/.."
seed=${1:-0}
shift || true
[[ $seed =~ ^[0-9]+$ ]] || { sed -n '2,6p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
m3=${M3:-build/cpu/m3}
step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

if [[ ! -x $m3 ]]; then
  step "packages and program (a few minutes)"
  scripts/install-packages.sh
  cmake --preset cpu
  cmake --build --preset cpu --target m3
fi
if [[ ! -e runs/nano/corpus/manifest.json ]]; then
  step "corpus: pages of Debian packages (about 110 MB of downloads)"
  mkdir -p runs/nano
  rm -rf runs/nano/corpus  # without a manifest it is unfinished
  M3=$m3 scripts/prepare-real-data.sh runs/nano/corpus text
fi
if [[ ! -e runs/nano/tokenizer/tokenizer.json ]]; then
  step "tokenizer"
  "$m3" data tokenizer runs/nano/tokenizer --corpus runs/nano/corpus --layout tests/golden/tokenizer/tiny
fi
output=runs/nano/seed-$seed
overrides=(--set "seed=$seed" --set "output=$output")
for word in "$@"; do overrides+=(--set "$word"); done
step "training into $output"
"$m3" train configs/train/nano.json --resume "${overrides[@]}"
model=$(ls -d "$output"/step-* | sort | tail -1)
release=$output/m3-nano
step "the model without what training keeps, as models/m3-nano: $release"
mkdir -p "$release"
cp "$model"/*.json "$model"/model.safetensors "$release"/
printf '{\n "eos_token_id": 1044,\n "temperature": 0\n}\n' >"$release/generation_config.json"
step "measures"
"$m3" eval "$release" --corpus runs/nano/corpus --count 256 --out "$output/measures.json"
"$m3" plot "$output" --out "$output/curves.html"
