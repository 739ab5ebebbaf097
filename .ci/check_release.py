"""check_release.py DIST VERSION: checks what goreleaser has made. The names are complete, the checksums match, each archive and package
contains the program, the unit, manual pages and completions, each program has its bill of materials, and each of them states VERSION."""

import gzip
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from packages import deb_files, rpm_files, tar_files, zip_files

dist = pathlib.Path(sys.argv[1])
version = sys.argv[2]
problems = []


def check(ok, text):
    if not ok:
        problems.append(text)


metadata = json.loads((dist / "metadata.json").read_text())
check((metadata["version"], metadata["tag"]) == (version, f"v{version}"), f"goreleaser has built {metadata['version']} of the tag {metadata['tag']}")

# Names and checksums.
platforms = [("linux", "amd64"), ("darwin", "arm64"), ("windows", "amd64")]
if "ONE_ARCHITECTURE" not in os.environ:
    platforms += [("linux", "arm64"), ("darwin", "amd64"), ("windows", "arm64")]
of_linux = [arch for system, arch in platforms if system == "linux"]
archives = {p: f"outrelay_{version}_{p[0]}_{p[1]}." + ("zip" if p[0] == "windows" else "tar.gz") for p in platforms}
bills = {p: f"outrelay_{version}_{p[0]}_{p[1]}.cdx.json" for p in platforms}
packages = [f"outrelay_{version}_linux_{arch}.{kind}" for arch in of_linux for kind in ("deb", "rpm")]
wanted = {*archives.values(), *bills.values(), *packages}
listed = dict(reversed(line.split()) for line in (dist / "checksums.txt").read_text().splitlines())
check(set(listed) == wanted, f"checksums.txt lists {sorted(set(listed) ^ wanted)} too much or too little")
for name, want in listed.items():
    path = dist / name
    check(path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == want, f"{name} does not exist or has another checksum")

manual, completions = "outrelay.1.gz", ("outrelay.bash", "outrelay.fish", "_outrelay")


def program_of(system, arch):
    """Returns the program that goreleaser has built."""
    found = [p for p in dist.glob(f"*_{system}_{arch}*/outrelay*") if p.is_file()]
    check(len(found) == 1, f"{len(found)} programs for {system}/{arch}")
    return found[0].read_bytes()


# Archives.
for (system, arch), name in archives.items():
    files = (zip_files if system == "windows" else tar_files)((dist / name).read_bytes())
    program = "outrelay.exe" if system == "windows" else "outrelay"
    check(files.get(program) == program_of(system, arch), f"{name}: {program} is not the program that was built")
    for file in ("LICENSE", "README.md", "outrelay.example.yaml", "outrelay.service", f"man/{manual}", *(f"completions/{c}" for c in completions)):
        check(files.get(file), f"{name} has no {file}, but {sorted(files)[:12]}")

# Packages.
for arch in of_linux:
    deb, control = deb_files((dist / f"outrelay_{version}_linux_{arch}.deb").read_bytes())
    described = control["control"].decode()
    check(f"Architecture: {arch}\n" in described and f"Version: {version}\n" in described, f"the deb for {arch} has another architecture or version: {described}")
    rpm, tags = rpm_files((dist / f"outrelay_{version}_linux_{arch}.rpm").read_bytes())
    described = [tags[t] for t in ("name", "version", "release", "arch")]
    check(described == ["outrelay", version, "1", {"amd64": "x86_64", "arm64": "aarch64"}[arch]], f"the rpm for {arch} is {described}")
    for kind, files, zsh in (("deb", deb, "vendor-completions"), ("rpm", rpm, "site-functions")):
        unit = files.get("usr/lib/systemd/system/outrelay.service", b"").decode()
        check("ExecStart=/usr/bin/outrelay run --config /etc/outrelay/outrelay.yaml\n" in unit and "/usr/local" not in unit, f"{kind}: the unit does not start /usr/bin/outrelay:\n{unit[:400]}")
        check(files.get("usr/bin/outrelay") == program_of("linux", arch), f"{kind} for {arch}: /usr/bin/outrelay is not the program that was built")
        for file in (f"man/man1/{manual}", "bash-completion/completions/outrelay", "fish/vendor_completions.d/outrelay.fish", f"zsh/{zsh}/_outrelay", "doc/outrelay/copyright"):
            check(files.get("usr/share/" + file), f"{kind} has no /usr/share/{file}, but {sorted(files)[:12]}")
    check(f'"outrelay {version}"' in gzip.decompress(deb[f"usr/share/man/man1/{manual}"]).decode(), "the manual page has another version")

# Bills of materials: the modules of each program, without those for other systems.
for (system, arch), name in bills.items():
    bill = json.loads((dist / name).read_text())
    modules = {c["name"] for c in bill["components"]}
    told = subprocess.run(["go", "version", "-m", next(p for p in dist.glob(f"*_{system}_{arch}*/outrelay*"))], capture_output=True, text=True, check=True)
    linked = {line.split()[1] for line in told.stdout.splitlines() if line.split()[0] == "dep"}
    check(bill["metadata"]["component"]["version"] == version and modules - {"std"} == linked and len(linked) > 10, f"{name} differs from the program: {sorted((modules - {'std'}) ^ linked)}")

# The Homebrew cask names the version, and the archives with their checksums.
cask = (dist / "homebrew" / "Casks" / "outrelay.rb").read_text()
check(f'version "{version}"' in cask, "the cask has another version")
for platform in platforms:
    check(platform[0] == "windows" or listed[archives[platform]] in cask, f"the cask has no checksum of {archives[platform]}")

# The program of this machine prints the version.
with tempfile.TemporaryDirectory() as home:
    program = pathlib.Path(home) / "outrelay"
    program.write_bytes(tar_files((dist / archives[("linux", "amd64")]).read_bytes())["outrelay"])
    program.chmod(0o755)
    told = json.loads(subprocess.run([program, "version", "--json"], capture_output=True, text=True, check=True).stdout)
    check(told["version"] == version, f"the program says {told}")

if problems:
    sys.exit("\n".join(problems))
print(f"   outrelay {version}: {len(wanted)} files, {len(platforms)} platforms")
