#!/usr/bin/env bash
# Runs the client tests: tests/clients/run.sh SCRIPTED_SERVER MODEL WORK_FOLDER [PYTEST...]. The official clients and a coding agent
# are installed into WORK_FOLDER/venv once. Exit code 77 (skipped) where they cannot be installed.
set -euo pipefail
server=$1 model=$2 work=$3
here=$(cd "$(dirname "$0")" && pwd)
python=$work/venv/bin/python
wanted=$(cat "$here"/requirements*.txt)
install() {
  python3 -m venv "$work/venv" &&
    "$python" -m pip install -q --disable-pip-version-check -r "$here/requirements.txt" &&
    "$python" -m pip install -q --disable-pip-version-check --no-deps -r "$here/requirements-agent.txt"
}
if [[ ! -e $work/installed.txt || $(<"$work/installed.txt") != "$wanted" ]]; then
  mkdir -p "$work"
  if ! install; then
    echo "skipped: the Python packages of tests/clients/requirements*.txt cannot be installed here"
    exit 77
  fi
  echo "$wanted" >"$work/installed.txt"
fi
export M3_SCRIPTED_SERVER=$server M3_TEST_MODEL=$model PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=passive
exec "$python" -m pytest -q -rs -p no:cacheprovider "$here" "${@:4}"
