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

# --- numbers that do not fit are refused, not bent
expect 2 'temperature' "$m3" run $model -p x --temperature inf
expect 2 'top-k' "$m3" run $model -p x --top-k 4294967297
expect 2 'seed.*out of range' "$m3" run $model -p x --seed 99999999999999999999
expect 2 'seed' "$m3" run $model -p x --seed -1
expect 2 'seed.*negative' "$m3" init $model/config.json "$work/seed" --seed -1
expect 2 'context.*out of range' "$m3" inspect $model --context 99999999999999999999
for command in "run $model -p x" "verify tests/golden/rule.json" "init $model $work/threads" "bench msa"; do
  expect 2 'threads.*between 0 and 1024' "$m3" $command --threads -1
  expect 2 'threads.*between 0 and 1024' "$m3" $command --threads 100000
done
expect 0 '"finish_reason"' "$m3" run $model -p x --max-tokens 9223372036854775807 --context 400 --json
expect 2 'count' "$m3" data synthetic "$work/data" --count 0
expect 2 'shard-size' "$m3" data synthetic "$work/data" --shard-size 0
expect 2 'valid' "$m3" data synthetic "$work/data" --valid nan
expect 2 'KEY=VALUE.*foo' "$m3" train configs/train/nano.json --set foo --check
expect 2 'context' "$m3" bench msa --context 100 --new 200
expect 2 'stop-after' "$m3" train configs/train/nano.json --stop-after -1 --check
expect 1 '99999999.*ids are 0 to' "$m3" tokenize $model --decode '1 2 99999999'
expect 1 '-2' "$m3" tokenize $model --decode '1 -2'

# --- things that are not there, or not what they should be
expect 1 'no-such-model' "$m3" run no-such-model -p x
expect 1 'no-such-model' "$m3" inspect no-such-model
expect 1 'no-such-picture.png' "$m3" run $model -p x --image no-such-picture.png
expect 1 'no-such-film.mp4' "$m3" run $model -p x --video no-such-film.mp4
expect 1 'no-such-text.txt' "$m3" run $model -p x --file no-such-text.txt
expect 1 'vision' "$m3" run tests/golden/models/tiny-text -p x --image tests/golden/media/broken/jpeg_named.png
expect 0 '.' "$m3" run --image examples/picture.png $model -p x --max-tokens 1  # an option takes one value, not the model too
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
expect 1 'no golden found under src/base' "$m3" verify tests/golden/rule.json src/base
expect 2 'OUT' "$m3" init $model ''
expect 1 '(not a regular file|cannot be read)' "$m3" verify tests/golden/rule.json --json "$work"
mkfifo "$work/pipe"
expect 1 'pipe: not a regular file' timeout 20 "$m3" run $model -p x --file "$work/pipe"
expect 1 'pipe: not a regular file' timeout 20 "$m3" run $model -p x --image "$work/pipe"
printf 'good \xff bad' >"$work/latin.txt"
expect 1 'latin.txt: not valid UTF-8 at byte 5' "$m3" run $model -p x --file "$work/latin.txt"
expect 1 'the prompt: not valid UTF-8 at byte 5' "$m3" run $model -p "$(cat "$work/latin.txt")"
expect 1 'the prompt: not valid UTF-8 at byte 5' bash -c "'$m3' run $model <'$work/latin.txt'"
expect 1 'the system prompt: not valid UTF-8 at byte 5' "$m3" run $model -p x --system "$(cat "$work/latin.txt")"

# --- standard streams that are full, closed or no files
expect 1 'not written in full|cannot write' bash -c "'$m3' inspect $model >/dev/full"
expect 1 'not written in full|cannot write' bash -c "'$m3' run --help >/dev/full"
expect 1 'not written in full|cannot write' bash -c "'$m3' run $model -p x --max-tokens 2 --json >/dev/full"
expect 1 '' bash -c "'$m3' verify no-such-folder 2>/dev/full"
expect 1 '' bash -c "'$m3' verify no-such-folder 2>&-"
expect 1 'standard input' bash -c "'$m3' run $model --max-tokens 2 </"
expect 1 'standard input' bash -c "'$m3' tokenize $model </"

# --- a damaged golden is a failure, not left out
mkdir "$work/goldens"
cp tests/golden/rule.json "$work/goldens/good.json"
head -c 300 tests/golden/rule.json >"$work/goldens/cut.json"
expect 1 'FAILED .*cut.json.*not valid JSON' "$m3" verify "$work/goldens"
echo '{"kind": "mist"}' >"$work/goldens/cut.json"
expect 1 'FAILED .*cut.json.*no golden is of kind "mist"' "$m3" verify "$work/goldens"
echo '[]' >"$work/goldens/cut.json"
expect 1 'FAILED .*cut.json.*no golden begins like this' "$m3" verify "$work/goldens"
echo '{"kind": 3}' >"$work/goldens/cut.json"
expect 1 'FAILED .*cut.json' "$m3" verify "$work/goldens"
echo '{"kind": "model", "cases": []}' >"$work/goldens/cut.json"
expect 1 'FAILED .*cut.json.*holds no case' "$m3" verify "$work/goldens"

rm "$work/goldens/"*
cp -r tests/golden/models/tiny-text "$work/goldens/"
rm -f "$work/goldens/tiny-text/golden.safetensors"
expect 1 'long/chunks .*golden.safetensors: cannot open' "$m3" verify "$work/goldens" --filter long

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

# Weights that are no numbers end the answer: a message and exit code 1. The header stays, the data become NaN.
begin=$((8 + $(od -An -tu8 -N8 $model/model.safetensors)))
{
  head -c $begin $model/model.safetensors
  head -c $(($(stat -Lc %s $model/model.safetensors) - begin)) /dev/zero | tr '\0' '\377'
} >"$work/broken/model.safetensors"
cp $model/tokenizer.json "$work/broken/"
expect 1 'm3 run: the answer failed' "$m3" run "$work/broken" -p x --json

# --- what must work
expect 0 'tensors' "$m3" init $model "$work/with slash/"
expect 0 '"finish_reason"' "$m3" run "$work/with slash" -p x --max-tokens 2 --json
expect 0 '"finish_reason"' "$m3" run $model -p 'What is a block?' --max-tokens 4 --temperature 0 --json
expect 0 'tokens' "$m3" inspect $model --context 4096
expect 0 '5 passed, 0 failed' "$m3" verify tests/golden/rule.json
expect 0 '' "$m3" tokenize $model 'Hello there'

printf '%d passed, %d failed\n' "$passed" "$failed"
[[ $failed == 0 ]]
