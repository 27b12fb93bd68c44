#!/usr/bin/env bash
# Runs the client tests: tests/clients/run.sh SCRIPTED_SERVER MODEL WORK_FOLDER. The official clients are installed into
# WORK_FOLDER/venv once. Exit code 77 (skipped) where they cannot be installed.
set -euo pipefail
server=$1 model=$2 work=$3
here=$(cd "$(dirname "$0")" && pwd)
python=$work/venv/bin/python
if ! cmp -s "$here/requirements.txt" "$work/installed.txt"; then
  mkdir -p "$work"
  if ! { python3 -m venv "$work/venv" && "$python" -m pip install -q --disable-pip-version-check -r "$here/requirements.txt"; }; then
    echo "skipped: the Python packages of tests/clients/requirements.txt cannot be installed here"
    exit 77
  fi
  cp "$here/requirements.txt" "$work/installed.txt"
fi
export M3_SCRIPTED_SERVER=$server M3_TEST_MODEL=$model PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=passive
exec "$python" -m pytest -q -rs -p no:cacheprovider "$here"
