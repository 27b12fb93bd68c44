#!/usr/bin/env bash
# What a person at the command line meets: exit codes, help, and messages that name the thing.
#   tests/command_line_test.sh build/hopper/m3
set -u
m3=$(realpath "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=tests/golden/models/tiny-vl
passed=0 failed=0

# expect CODE 'extended regex of stdout and stderr together' command...
expect() {
  local want=$1 pattern=$2 output code
  shift 2
  output=$("$@" 2>&1 </dev/null)
  code=$?
  if [[ $code == "$want" ]] && grep -qE -- "$pattern" <<<"$output"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    printf 'FAILED: %s\n  exit code %s, want %s; pattern %s\n%s\n' "$*" "$code" "$want" "$pattern" "$(head -c 600 <<<"$output")"
  fi
}

# --- help and wrong usage
expect 0 'Usage: m3 COMMAND' "$m3" --help
expect 0 '^m3 [0-9]+\.' "$m3" --version
expect 2 'Usage: m3 COMMAND' "$m3"
expect 2 "unknown command 'fly'" "$m3" fly
for command in $("$m3" --help | sed -nE 's/^  ([a-z-]+) .*/\1/p'); do
  expect 0 'Example:' "$m3" "$command" --help
  expect 2 "--help|unknown kind" "$m3" "$command" --no-such-flag
done
expect 2 'MODEL is required' "$m3" run
expect 2 'thinking' "$m3" run $model -p x --thinking loudly
expect 2 'attention' "$m3" run $model -p x --attention all
expect 2 'max-tokens' "$m3" run $model -p x --max-tokens 0
expect 2 'max-tokens' "$m3" run $model -p x --max-tokens many
expect 2 'temperature' "$m3" run $model -p x --temperature -1
expect 2 'top-p' "$m3" run $model -p x --top-p 1.5
expect 2 'context' "$m3" run $model -p x --context 1

# --- things that are not there, or not what they should be
expect 1 'no-such-model' "$m3" run no-such-model -p x
expect 1 'no-such-model' "$m3" inspect no-such-model
expect 1 'no-such-picture.png' "$m3" run $model -p x --image no-such-picture.png
expect 1 'no-such-film.mp4' "$m3" run $model -p x --video no-such-film.mp4
expect 1 'no-such-text.txt' "$m3" run $model -p x --file no-such-text.txt
expect 1 'vision' "$m3" run tests/golden/models/tiny-text -p x --image tests/golden/media/broken/jpeg_named.png
expect 1 'no golden found' "$m3" verify src/base
expect 1 'no case ran' "$m3" verify tests/golden/msa --filter no-such-case
expect 1 'no such file' "$m3" verify no-such-folder
expect 1 'exists' "$m3" init benchmarks/workloads/cpu_270m_config.json "$work"

# --- m3 serve
if "$m3" --help | grep -q '^  serve'; then
  expect 2 'api-key' "$m3" serve $model --host 0.0.0.0
  expect 2 'port' "$m3" serve $model --port 70000
  expect 1 'no-such-model' "$m3" serve no-such-model
  expect 1 '2000000' "$m3" serve $model --context 2000000
  expect 1 'cannot connect' "$m3" bench serve --url http://127.0.0.1:1
fi

# --- broken files, by the command that meets them
cp -r $model "$work/broken"
chmod -R u+w "$work/broken"
head -c 100 $model/model.safetensors >"$work/broken/model.safetensors"
expect 1 'model.safetensors' "$m3" run "$work/broken" -p x
echo '{"model_type": "llama"}' >"$work/broken/config.json"
expect 1 'config.json.*(model_type|llama)' "$m3" inspect "$work/broken"
cp $model/config.json $model/model.safetensors "$work/broken/"
echo '{' >"$work/broken/tokenizer.json"
expect 1 'tokenizer.json' "$m3" run "$work/broken" -p x
expect 1 'tokenizer.json' "$m3" tokenize "$work/broken" hello

# --- what must work
expect 0 '"finish_reason"' "$m3" run $model -p 'What is a block?' --max-tokens 4 --temperature 0 --json
expect 0 'tokens' "$m3" inspect $model --context 4096
expect 0 '5 passed, 0 failed' "$m3" verify tests/golden/rule.json
expect 0 '' "$m3" tokenize $model 'Hello there'

printf '%d passed, %d failed\n' "$passed" "$failed"
[[ $failed == 0 ]]
