#!/bin/sh
# After an installation or an upgrade: a relay that runs starts again with the new program. A new one is not started, because it has
# no configuration yet.
set -e
if [ -d "${DPKG_ROOT:-}/run/systemd/system" ]; then
	systemctl daemon-reload
	systemctl try-restart outrelay.service
fi
