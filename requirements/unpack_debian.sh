#!/usr/bin/env bash
# unpack_debian.sh RELEASE FOLDER PACKAGE...: take packages of a Debian release apart into FOLDER. Nothing is installed, and the
# machine's own package sources stay as they are.
set -euo pipefail
release=$1 folder=$2
shift 2
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{etc/sources.list.d,etc/preferences.d,etc/apt.conf.d,lists/partial,cache/archives/partial}
site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | head -1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $release main" >"$work/etc/sources.list"
options=(-qq -o "Dir::Etc=$work/etc" -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
cd "$work"
apt-get "${options[@]}" update
apt-get "${options[@]}" download "$@"
for package in ./*.deb; do dpkg-deb --extract "$package" "$folder"; done
