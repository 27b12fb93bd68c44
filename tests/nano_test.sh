#!/usr/bin/env bash
# The model that ships: the questions of scripts/demo.sh, and a few of the measures of its card.
#   tests/nano_test.sh build/hopper/m3
set -u
m3=$(realpath "$1")
cd "$(dirname "$0")/.."
failed=0

# answer 'wanted text' arguments of m3 run...
answer() {
  local want=$1 got
  shift
  got=$("$m3" run models/m3-nano --thinking disabled --temperature 0 --max-tokens 32 "$@" 2>/dev/null | tail -1)
  [[ $got == "$want" ]] && return
  failed=$((failed + 1))
  printf 'FAILED: %s\n  answered "%s", want "%s"\n' "$*" "$got" "$want"
}
answer "three black stars and a green moon" --image examples/picture.png -p "What is in the picture?"
answer "three" --image examples/picture.png -p "How many stars are there?"
answer "86" --image examples/number.png -p "What number is in the picture?"
answer "a purple ring moves down" --video examples/clip.mp4 -p "What happens in the clip?"
answer "Agent Yuki harbour." --file examples/agents.txt -p "Who is agent Yuki?"

# at_least PERCENT MEASURE: on 64 held-out documents; the card's figure less four standard deviations
at_least() {
  local got
  got=$("$m3" eval models/m3-nano --only "$2" --count 64 --json 2>/dev/null | grep -m1 -oE '"value": ?[0-9.]+' | grep -oE '[0-9.]+$')
  if [[ -z $got ]] || awk "BEGIN{exit !($got < $1)}"; then
    failed=$((failed + 1))
    printf 'FAILED: %s is %s, want at least %s\n' "$2" "${got:-absent}" "$1"
  fi
}
at_least 93 "picture: colour"
at_least 56 "picture: number"
at_least 45 "clip: event of one object"

[[ $failed == 0 ]] && echo "the shipped model answers as its card says"
exit $((failed > 0))
