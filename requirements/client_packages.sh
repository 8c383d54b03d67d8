#!/usr/bin/env bash
# Put a client's locked packages, requirements/NAME.txt, into .venv/share/NAME, where only its tests see them.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/$1.txt target=.venv/share/$1
cmp -s "$lock" "$target/locked.txt" && exit
rm -rf "$target"
# What a test imports is compiled then, and kept; the most of it no test imports.
.venv/bin/pip install --disable-pip-version-check --quiet --no-compile --no-deps --require-hashes --target "$target" -r "$lock" || {
  echo "client-tools: NO $1: its packages cannot be had; its tests will be skipped" >&2
  exit 1
}
cp "$lock" "$target/locked.txt"
