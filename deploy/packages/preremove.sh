#!/bin/sh
# Before a removal, not before an upgrade: deb passes "remove", rpm passes 0.
set -e
if [ -d "${DPKG_ROOT:-}/run/systemd/system" ] && { [ "$1" = remove ] || [ "$1" = 0 ]; }; then
	systemctl disable --now outrelay.service
fi
