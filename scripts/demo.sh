#!/usr/bin/env bash
# Installs packages, builds, and asks m3-nano (models/m3-nano, 4 million parameters, trained by this code) about a picture, a
# film and a document on the CPU. Needs Debian 12, root or sudo. Then a model with random weights reads a text of more than
# 100,000 tokens: m3-nano has positions for 8,192, so there only the path is real, not the answer.
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

step "packages (a minute the first time)"
scripts/install-packages.sh
step "build, preset cpu (about seven minutes on two cores the first time)"
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target m3
m3=build/cpu/m3
ask() { $m3 run models/m3-nano --thinking disabled --max-tokens 32 "$@"; }

step "a picture: three black stars and a green moon (seconds)"
ask --image examples/picture.png -p "What is in the picture?"
ask --image examples/picture.png -p "How many stars are there?"
step "a picture: the number 86"
ask --image examples/number.png -p "What number is in the picture?"
step "a film: a purple ring moves down"
ask --video examples/clip.mp4 -p "What happens in the clip?"
step "a document of about 3,000 tokens with ten agents hidden in it: agent Yuki harbour"
ask --file examples/agents.txt -p "Who is agent Yuki?"

step "a text of more than 100,000 tokens, random weights (a minute or two)"
text=$(mktemp --suffix .txt)
trap 'rm -f "$text"' EXIT
head -c 215000 < <(cat docs/spec/*.md docs/*.md src/*/*.h src/ops/*/*.h) | iconv -c -f UTF-8 -t UTF-8 >"$text"
$m3 run tests/golden/models/tiny-vl -p "What is this about?" --file "$text" --thinking disabled --max-tokens 16 --temperature 0

step "block-sparse against full attention at 100,000 tokens, one layer of M3's geometry (a minute or two)"
$m3 bench msa --context 100000 --new 256 --attention msa,full
$m3 bench msa --context 100000 --new 1 --attention msa,full
