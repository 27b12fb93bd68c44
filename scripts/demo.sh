#!/usr/bin/env bash
# Installs packages, builds, and lets a model read a photograph, a film and a long text on the CPU.
# Needs Debian 12, root or sudo. The models are tiny and have random weights: what they say has no meaning, how they come to say it
# is the real path (chat template, tokenizer, vision tower, sparse attention over more than 100,000 tokens).
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

step "packages (a minute the first time)"
scripts/install-packages.sh
step "build, preset cpu (about seven minutes on two cores the first time)"
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target m3
m3=build/cpu/m3
models=tests/golden/models media=tests/golden/media/files

step "a photograph (seconds)"
$m3 run $models/tiny-vl -p "What is in the picture?" --image $media/photo.jpg --thinking disabled --max-tokens 24 --temperature 0

step "a film (seconds)"
$m3 run $models/tiny-vl -p "What happens?" --video $media/clip.mp4 --thinking disabled --max-tokens 24 --temperature 0

step "a text of more than 100,000 tokens (a minute or two)"
text=$(mktemp --suffix .txt)
trap 'rm -f "$text"' EXIT
head -c 215000 < <(cat docs/spec/*.md docs/*.md src/*/*.h src/ops/*/*.h) >"$text"
$m3 run $models/tiny-vl -p "What is this about?" --file "$text" --thinking disabled --max-tokens 16 --temperature 0

step "block-sparse against full attention at 100,000 tokens, one layer of M3's geometry (a minute or two)"
$m3 bench msa --context 100000 --new 256 --attention msa,full
$m3 bench msa --context 100000 --new 1 --attention msa,full
