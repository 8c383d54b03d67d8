#!/usr/bin/env bash
# Steps of an image build; see docker/README.md.
#   taut ROOT FILE      taut itself, from the sources in this directory and built with the locked set FILE, into ROOT/opt/taut
#   compiled ROOT FILE...  the gateway's hot path, compiled with the locked sets in each FILE, into ROOT/service; nothing where that
#                       cannot be done or TAUT_COMPILE is not 1
#   locked WHAT...      into /opt/taut, which is made without a pip of its own: `torch`, or the locked set in a file WHAT
# pip's settings come from /etc/pip.conf (a build secret) and, if wheels were given, from /wheelhouse. The pip that works
# here comes with BASE_IMAGE and is gone when the step ends.
set -euo pipefail
torch=2.13.0
python=/opt/taut/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
tools=/tmp/tools
locks=$(cd "$(dirname "$0")" && pwd) # torch's, which lie beside this script in an image
pip=("$tools/bin/pip" --quiet)
# Wheels made on the host: then no index is asked.
wheels=()
if compgen -G '/wheelhouse/*.whl' >/dev/null; then wheels=(--no-index --find-links /wheelhouse); fi

say() { printf 'image: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

prepare() {
  python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || die "$(python3 --version) in BASE_IMAGE: the locked set is for CPython 3.11"
  python3 -c 'import ensurepip' 2>/dev/null \
    || die "no ensurepip in BASE_IMAGE: on Debian it is in the package python3-venv"
  trap 'rm -rf "$tools"' EXIT
  python3 -m venv "$tools"
  [ -x "$python" ] || python3 -m venv --without-pip /opt/taut
}

# A file whose hash is not in the lock ends the build: it is never mistaken for "no such build".
install_torch() {
  local pip=("${pip[@]}" --python "$python" install) cpu said
  cpu=("${pip[@]}" --no-deps --require-hashes -r "$locks/torch-cpu.txt")
  said=$("${cpu[@]}" "${wheels[@]}" 2>&1) && return
  case $said in *"DO NOT MATCH THE HASHES"*) die "torch: a file that is not the one of torch-cpu.txt was offered, and refused" ;; esac
  if [ -n "${TAUT_TORCH_INDEX:-}" ]; then
    "${cpu[@]}" --index-url "$TAUT_TORCH_INDEX"
    return
  fi
  say "NO CPU BUILD OF TORCH HERE: taking the index's torch $torch with its CUDA libraries, several GB that a CPU does not use."
  say "Give the build argument TAUT_TORCH_INDEX (PyTorch's index of CPU wheels, named on PyTorch's 'get started' page) for a small image."
  "${pip[@]}" "${wheels[@]}" --no-deps --require-hashes -r "$locks/torch.txt"
  say "not checked against a hash: the CUDA libraries that this torch asks for"
  "${pip[@]}" "${wheels[@]}" "torch==$torch"
}

install_lock() {
  "${pip[@]}" --python "$python" install "${wheels[@]}" --no-deps --require-hashes -r "$1"
}

install_taut() {
  "${pip[@]}" install "${wheels[@]}" --no-deps --require-hashes -r "$2"
  "${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$tools/dist" .
  "${pip[@]}" --python "$python" install --no-deps --no-index --root "$1" "$tools"/dist/taut-*.whl
}

# The Python that it is compiled from does the same, only slower: what is missing is said, and the build goes on.
compile_gateway() {
  local root=$1 file
  mkdir -p "$root"
  if [ "${TAUT_COMPILE:-}" != 1 ]; then
    say "the gateway stays Python, as TAUT_COMPILE=${TAUT_COMPILE:-} says"
    return
  fi
  prepare
  for file in "${@:2}"; do "${pip[@]}" install "${wheels[@]}" --no-compile --no-deps --require-hashes -r "$file"; done
  "$tools/bin/python" service/compile.py || true
  if [ ! -f service/taut_service/compiled_from.json ]; then
    say "THE GATEWAY STAYS PYTHON, for the reason above: about a quarter fewer requests per CPU-second."
    say "TAUT_COMPILE=0 leaves compiling out."
    return
  fi
  find service '(' -name '*.so' -o -name compiled_from.json ')' -exec cp --parents -t "$root" '{}' +
  say "the gateway's hot path is compiled"
}

command=${1:-}
[ "$#" -ge 2 ] || die "usage: install_locked.sh taut ROOT FILE | compiled ROOT FILE... | locked torch|FILE..."
shift
[ "$command" = compiled ] || prepare
case $command in
  taut) install_taut "$1" "$2" ;;
  compiled) compile_gateway "$@" ;;
  locked) for what in "$@"; do if [ "$what" = torch ]; then install_torch; else install_lock "$what"; fi; done ;;
  *) die "$command: no such step" ;;
esac
