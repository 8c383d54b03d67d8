#!/usr/bin/env bash
# Put genai-perf's load generator into .venv/share/genai-perf/bin. It is a program for glibc 2.38: where that is missing, as on
# Debian 12, it runs with the libraries of Debian 13, which no other program sees.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$PWD/.venv/share/genai-perf program=perf_analyzer/bin/perf_analyzer
[ -x "$target/bin/perf_analyzer" ] && exit
[ "$(uname -m)" = x86_64 ] || { echo "client-tools: NO perf_analyzer: it is taken for x86-64 only" >&2; exit 1; }
# pip takes a wheel for a glibc that is not here only if told so.
.venv/bin/pip install --disable-pip-version-check --quiet --no-deps --require-hashes --only-binary=:all: --platform manylinux_2_38_x86_64 \
  --target "$target/analyzer" -r requirements/perf-analyzer.txt
chmod +x "$target/analyzer/$program"
run=()
if ! "$target/analyzer/$program" --version >/dev/null 2>&1; then
  bash requirements/unpack_debian.sh trixie "$target/debian" libc6 libstdc++6 libgcc-s1 zlib1g libssl3t64 libzstd1
  libraries=$target/debian/usr/lib/x86_64-linux-gnu
  run=("$libraries/ld-linux-x86-64.so.2" --library-path "$libraries")
fi
mkdir -p "$target/bin"
printf '#!/bin/sh\nexec %s "$@"\n' "${run[*]} $target/analyzer/$program" >"$target/bin/perf_analyzer.new"
chmod +x "$target/bin/perf_analyzer.new"
"$target/bin/perf_analyzer.new" --version
mv "$target/bin/perf_analyzer.new" "$target/bin/perf_analyzer"
