#!/usr/bin/env bash
# Makes .venv/ with the locked set. Called by `make setup`; safe to run again.
#   PYTHON            interpreter to build it with (default python3; 3.11 is what the lock was made for)
#   TAUT_TORCH_INDEX  wheel index with a CPU build of torch, if pip's own settings do not lead to one
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv
torch=2.13.0

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# vLLM's CPU worker compiles C++ at start; Debian splits venv and the headers off python3.
apt_packages() {
  command -v g++ >/dev/null || echo g++
  ldconfig -p 2>/dev/null | grep -q "libnuma.so.1" || echo libnuma1
  "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
  "$python" -c 'import sysconfig,pathlib,sys; sys.exit(not (pathlib.Path(sysconfig.get_path("include"))/"Python.h").exists())' \
    || echo python3-dev
}

# The images' way (docker/install_locked.sh): PyPI has no CPU build for Linux, and a first `make` should not end there.
# A file whose hash is not in the lock ends it: it is never taken, and never mistaken for "no such build".
install_torch() {
  local cpu=("${pip[@]}" install --no-deps --require-hashes -r requirements/torch-cpu.txt) said
  say "installing torch $torch (CPU build)"
  said=$("${cpu[@]}" 2>&1) && return
  case $said in *"DO NOT MATCH THE HASHES"*) die "torch: a file that is not the one of requirements/torch-cpu.txt was offered, and refused" ;; esac
  if [ -n "${TAUT_TORCH_INDEX:-}" ]; then
    "${cpu[@]}" --index-url "$TAUT_TORCH_INDEX" \
      || die "no CPU build of torch $torch at TAUT_TORCH_INDEX, or not the one of requirements/torch-cpu.txt"
    return
  fi
  say "NO CPU BUILD OF TORCH HERE: taking the index's torch $torch with its CUDA libraries, several GB that a CPU does not use."
  say "To save them, stop this and set TAUT_TORCH_INDEX to PyTorch's index of CPU wheels (named on PyTorch's 'get started' page)."
  "${pip[@]}" install --no-deps --require-hashes -r requirements/torch.txt \
    || die "pip finds no torch $torch at all, or not the one of requirements/torch.txt"
  say "not checked against a hash: the CUDA libraries that this torch asks for"
  "${pip[@]}" install "torch==$torch" || die "pip cannot install what torch $torch asks for"
}

command -v "$python" >/dev/null || die "no $python here; install CPython 3.11 or set PYTHON"
"$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 12)))' \
  || die "$("$python" --version) found; the locked set is for CPython 3.11: set PYTHON to one"
mapfile -t missing < <(apt_packages)
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    die "missing: ${missing[*]}; install them (apt-get install ${missing[*]}) and run this again"
  fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

if ! "$venv/bin/python" -c "import torch,sys; sys.exit(torch.__version__.split('+')[0] != '$torch' or torch.version.cuda is not None)" 2>/dev/null; then
  install_torch
fi
say "installing the locked set"
"${pip[@]}" install --no-deps --require-hashes -r requirements/cpu.txt -r requirements/dev.txt 2> >(grep -v '^WARNING: Location' >&2)
"${pip[@]}" install --no-deps --no-build-isolation --editable . 2> >(grep -v '^WARNING: Location' >&2)
say "done: $("$venv/bin/python" --version) in $venv"
