#!/bin/sh
# prepare.sh VERSION: makes what archives and packages contain besides the program, in release-files.
set -eu
cd "$(dirname "$0")/../.."
rm -rf release-files
mkdir -p release-files/man release-files/completions

# It also prints the bills of materials of the programs for other systems.
CGO_ENABLED=0 go build -tags release -trimpath -buildvcs=false -ldflags="-s -w -buildid= -X main.version=$1" -o release-files/outrelay ./cmd/outrelay

release-files/outrelay docs --man release-files/man
gzip -9n release-files/man/*.1
release-files/outrelay completion bash >release-files/completions/outrelay.bash
release-files/outrelay completion zsh >release-files/completions/_outrelay
release-files/outrelay completion fish >release-files/completions/outrelay.fish

# Packages put the program into /usr/bin, and the unit and an example of the configuration into their places.
sed -e 's#/usr/local/bin/outrelay#/usr/bin/outrelay#' -e '/^#   install -m 0755 outrelay /d' \
	deploy/systemd/outrelay.service >release-files/outrelay.service
