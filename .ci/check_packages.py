"""check_packages.py DIST VERSION: installs, upgrades and removes the deb and the rpm of this machine in directories of their own. The deb
needs dpkg and root, the rpm needs rpm; without them a note is printed, and the scripts of the rpm run alone. systemctl is replaced by a
program that writes down its arguments, because no service manager runs in such a directory."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

from packages import rpm_files

dist, version = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
deb, rpm = (dist / f"outrelay_{version}_linux_{arch}.{kind}" for kind in ("deb", "rpm"))


class Root:
    """A directory that packages are installed in."""

    def __init__(self, path):
        self.path = path
        self.log = path / "systemctl.log"
        fake = path / "fake" / "systemctl"
        for folder in (fake.parent, path / "var/lib/dpkg/info", path / "var/lib/dpkg/updates", path / "etc/outrelay"):
            folder.mkdir(parents=True)
        fake.write_text(f'#!/bin/sh\necho "$*" >>{self.log}\n')
        fake.chmod(0o755)
        (path / "var/lib/dpkg/status").touch()
        (path / "etc/outrelay/outrelay.yaml").write_text("watcher: mine\n")
        self.env = {"PATH": f"{fake.parent}:{os.environ['PATH']}:/usr/sbin:/sbin", "DPKG_ROOT": str(path)}

    def run(self, *command):
        """Runs a command, and returns its output."""
        done = subprocess.run([str(c) for c in command], env=self.env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def expect_calls(self, when, *want):
        """Checks what systemctl was called with since the last check."""
        got = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        if got != list(want):
            sys.exit(f"{when}: systemctl was called with {got}, want {list(want)}")

    def start_systemd(self):
        (self.path / "run/systemd/system").mkdir(parents=True)

    def check_installed(self):
        """Checks that the program runs and that the unit is valid."""
        told = self.run(self.path / "usr/bin/outrelay", "--version")
        if f"outrelay {version} " not in told:
            sys.exit(f"the installed program prints {told}")
        if shutil.which("systemd-analyze"):
            # The unit of the package, with the path of its program in this directory.
            unit = self.path / "outrelay.service"
            text = (self.path / "usr/lib/systemd/system/outrelay.service").read_text()
            unit.write_text(text.replace("/usr/bin/outrelay", str(self.path / "usr/bin/outrelay")))
            self.run("systemd-analyze", "verify", "--man=no", unit)
        else:
            note("no systemd-analyze: the unit is not verified")

    def check_removed(self):
        """Checks that only the configuration is left."""
        left = [str(p) for p in (self.path / "usr").rglob("*") if "outrelay" in p.name]
        if left or not (self.path / "etc/outrelay/outrelay.yaml").exists():
            sys.exit(f"after the removal: {left}, {list((self.path / 'etc').rglob('*'))}")


def note(text):
    print(f"   note: {text}")


def check_deb(root):
    dpkg = ["dpkg", f"--root={root.path}", "--force-script-chrootless"]
    root.run(*dpkg, "--install", deb)
    root.expect_calls("after an installation without systemd")
    state = root.run("dpkg-query", f"--admindir={root.path}/var/lib/dpkg", "--show", "--showformat=${db:Status-Status} ${Version} ${Architecture}", "outrelay")
    changed = root.run(*dpkg, "--verify", "outrelay")
    if state != f"installed {version} {arch}" or changed:
        sys.exit(f"dpkg has {state}; changed files: {changed}")
    root.check_installed()

    root.start_systemd()
    root.run(*dpkg, "--install", deb)
    root.expect_calls("after an upgrade", "daemon-reload", "try-restart outrelay.service")
    root.run(*dpkg, "--remove", "outrelay")
    root.expect_calls("after a removal", "disable --now outrelay.service")
    root.check_removed()
    print(f"   {deb.name}: installed, upgraded and removed by dpkg")


def check_rpm(root):
    _, tags = rpm_files(rpm.read_bytes())
    root.start_systemd()
    for when, script, argument, calls in (
        ("installation", "post", 1, ["daemon-reload", "try-restart outrelay.service"]),
        ("upgrade", "post", 2, ["daemon-reload", "try-restart outrelay.service"]),
        ("end of the old version", "preun", 1, []),
        ("removal", "preun", 0, ["disable --now outrelay.service"]),
    ):
        root.run("sh", "-c", tags[script], script, argument)
        root.expect_calls(when, *calls)

    if not shutil.which("rpm"):
        note(f"no rpm: {rpm.name} is unpacked and its scripts have run, but it is not installed")
        return
    # rpm would run the scripts in the directory, which has no shell.
    tool = ["rpm", f"--root={root.path}"]
    root.run(*tool, "--install", "--nodeps", "--noscripts", rpm)
    root.run(*tool, "--verify", "outrelay")
    root.check_installed()
    root.run(*tool, "--erase", "--noscripts", "outrelay")
    root.check_removed()
    print(f"   {rpm.name}: installed, verified and removed by rpm")


with tempfile.TemporaryDirectory() as work:
    for kind, check in (("deb", check_deb), ("rpm", check_rpm)):
        if kind == "deb" and not (shutil.which("dpkg") and os.geteuid() == 0):
            note(f"no dpkg, or not root: {deb.name} is not installed")
            continue
        path = pathlib.Path(work) / kind
        path.mkdir()
        check(Root(path))
