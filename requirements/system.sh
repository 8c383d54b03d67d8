#!/usr/bin/env bash
# Programs that tests want and no package index has: installed where this is root on Debian. Elsewhere
# the tests that want them are skipped, and the last lines of `make test` count them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then exit 0; fi
need=()
for tool in make g++ curl; do command -v "$tool" >/dev/null || need+=("$tool"); done
command -v redis-server >/dev/null || need+=(redis-server) # rate limits that gateways share
command -v pgrep >/dev/null || need+=(procps) # the end-to-end tests look at processes
command -v promtool >/dev/null || need+=(prometheus) # promtool tests the alert rules; one test lets the server scrape a gateway
for tool in podman buildah runc debootstrap iptables; do command -v "$tool" >/dev/null || need+=("$tool"); done # images are built and run
command -v catatonit >/dev/null || need+=(catatonit) # holds podman's pods, in which the chart is played
command -v npm >/dev/null || need+=(npm) # one definition that the chart is validated with is an npm package
command -v chromium >/dev/null || need+=(chromium) # pages are opened in it
for tool in netavark aardvark-dns; do [ -x "/usr/lib/podman/$tool" ] || need+=("$tool"); done
[ "${#need[@]}" = 0 ] || { apt-get update -qq; apt-get install -y -qq --no-install-recommends "${need[@]}"; }

# Two programs are taken out of their packages, not installed: the registry's package starts a server, and
# cosign is in a later release only.
unpack() ( # PROGRAM PACKAGE RELEASE
  command -v "$1" >/dev/null && exit 0
  root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
  # Joined by &&: bash does not stop at a failure where the caller asks for it by ||.
  bash "$here/unpack_debian.sh" "$3" "$root" "$2" && install "$root/usr/bin/$1" /usr/local/bin/
)
unpack docker-registry docker-registry bookworm || echo "system-tools: NO docker-registry: releases are not tried" >&2
unpack cosign cosign trixie || echo "system-tools: NO cosign: releases are not tried" >&2
