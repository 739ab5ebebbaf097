"""check_release.py DIST: checks what goreleaser has made. The names are complete, the checksums match, each archive and package contains
the program, the unit, manual pages and completions, each program has its bill of materials, and the program prints the version."""

import gzip
import hashlib
import io
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

dist = pathlib.Path(sys.argv[1])
version = json.loads((dist / "metadata.json").read_text())["version"]
problems = []


def check(ok, text):
    if not ok:
        problems.append(text)


# Names and checksums.
platforms = [(system, arch) for system in ("linux", "darwin", "windows") for arch in ("amd64", "arm64")]
archives = {p: f"outrelay_{version}_{p[0]}_{p[1]}." + ("zip" if p[0] == "windows" else "tar.gz") for p in platforms}
bills = {p: f"outrelay_{version}_{p[0]}_{p[1]}.cdx.json" for p in platforms}
packages = [f"outrelay_{version}_linux_{arch}.{kind}" for arch in ("amd64", "arm64") for kind in ("deb", "rpm")]
wanted = {*archives.values(), *bills.values(), *packages}
listed = dict(reversed(line.split()) for line in (dist / "checksums.txt").read_text().splitlines())
check(set(listed) == wanted, f"checksums.txt lists {sorted(set(listed) ^ wanted)} too much or too little")
for name, want in listed.items():
    path = dist / name
    check(path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == want, f"{name} does not exist or has another checksum")

manual, completions = "outrelay.1.gz", ("outrelay.bash", "outrelay.fish", "_outrelay")


def tar_files(raw):
    """Returns the files of a tar archive, by their names without a leading ./ or /."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {m.name.removeprefix(".").lstrip("/"): tar.extractfile(m).read() for m in tar if m.isfile()}


def zip_files(raw):
    with zipfile.ZipFile(io.BytesIO(raw)) as z:
        return {i.filename: z.read(i) for i in z.infolist()}


def deb_files(raw):
    """Returns the files and the control files of a Debian package: an ar archive of two tar archives."""
    check(raw.startswith(b"!<arch>\n"), "a deb is no ar archive")
    parts, at = {}, 8
    while at < len(raw):
        head = raw[at : at + 60]
        size = int(head[48:58])
        parts[head[:16].decode().strip().rstrip("/")] = raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return tar_files(parts["data.tar.gz"]), tar_files(parts["control.tar.gz"])


def rpm_files(raw):
    """Returns the files of an RPM package: a lead, two headers, and a compressed cpio archive."""

    def header_end(at):
        check(raw[at : at + 3] == b"\x8e\xad\xe8", "an rpm has no header")
        entries, size = int.from_bytes(raw[at + 8 : at + 12], "big"), int.from_bytes(raw[at + 12 : at + 16], "big")
        return at + 16 + 16 * entries + size

    signature = header_end(96)
    payload = gzip.decompress(raw[header_end(signature + -signature % 8) :])
    files, at = {}, 0
    while True:
        size, name_size = int(payload[at + 54 : at + 62], 16), int(payload[at + 94 : at + 102], 16)
        name = payload[at + 110 : at + 110 + name_size - 1].decode()
        start = at + 110 + name_size
        start += -start % 4
        if name == "TRAILER!!!":
            return files
        files[name.removeprefix(".").lstrip("/")] = payload[start : start + size]
        at = start + size
        at += -at % 4


def program_of(system, arch):
    """Returns the program that goreleaser has built."""
    found = [p for p in dist.glob(f"outrelay_{system}_{arch}*/outrelay*") if p.is_file()]
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
for arch in ("amd64", "arm64"):
    deb, control = deb_files((dist / f"outrelay_{version}_linux_{arch}.deb").read_bytes())
    check(f"Architecture: {arch}\n" in control["control"].decode(), f"the deb for {arch} has another architecture: {control['control'].decode()}")
    check(b"daemon-reload" in control.get("postinst", b"") and b"disable --now" in control.get("prerm", b""), "the deb has no scripts")
    rpm = rpm_files((dist / f"outrelay_{version}_linux_{arch}.rpm").read_bytes())
    for kind, files, zsh in (("deb", deb, "vendor-completions"), ("rpm", rpm, "site-functions")):
        unit = files.get("usr/lib/systemd/system/outrelay.service", b"").decode()
        check("ExecStart=/usr/bin/outrelay run --config /etc/outrelay/outrelay.yaml\n" in unit and "/usr/local" not in unit, f"{kind}: the unit does not start /usr/bin/outrelay:\n{unit[:400]}")
        check(files.get("usr/bin/outrelay") == program_of("linux", arch), f"{kind} for {arch}: /usr/bin/outrelay is not the program that was built")
        for file in (f"man/man1/{manual}", "bash-completion/completions/outrelay", "fish/vendor_completions.d/outrelay.fish", f"zsh/{zsh}/_outrelay", "doc/outrelay/copyright"):
            check(files.get("usr/share/" + file), f"{kind} has no /usr/share/{file}, but {sorted(files)[:12]}")
    check(".TH" in gzip.decompress(deb[f"usr/share/man/man1/{manual}"]).decode(), "the manual page is none")

# Bills of materials: the modules of each program, without those for other systems.
for (system, arch), name in bills.items():
    bill = json.loads((dist / name).read_text())
    modules = {c["name"] for c in bill["components"]}
    told = subprocess.run(["go", "version", "-m", next(p for p in dist.glob(f"outrelay_{system}_{arch}*/outrelay*"))], capture_output=True, text=True, check=True)
    linked = {line.split()[1] for line in told.stdout.splitlines() if line.split()[0] == "dep"}
    check(bill["metadata"]["component"]["version"] == version and modules - {"std"} == linked and len(linked) > 10, f"{name} differs from the program: {sorted((modules - {'std'}) ^ linked)}")

# The Homebrew cask names the archives with their checksums.
cask = (dist / "homebrew" / "Casks" / "outrelay.rb").read_text()
for platform in platforms[:4]:
    check(listed[archives[platform]] in cask, f"the cask has no checksum of {archives[platform]}")

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
