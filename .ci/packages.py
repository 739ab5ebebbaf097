"""Reads archives and packages without their tools."""

import gzip
import io
import tarfile
import zipfile

# The tags of an RPM package that are text, and that the checks use.
RPM_TAGS = {1000: "name", 1001: "version", 1002: "release", 1022: "arch", 1024: "post", 1025: "preun"}


def tar_files(raw):
    """Returns the files of a tar archive, by their names without a leading ./ or /."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {m.name.removeprefix(".").lstrip("/"): tar.extractfile(m).read() for m in tar if m.isfile()}


def zip_files(raw):
    with zipfile.ZipFile(io.BytesIO(raw)) as z:
        return {i.filename: z.read(i) for i in z.infolist()}


def deb_files(raw):
    """Returns the files and the control files of a Debian package: an ar archive of two tar archives."""
    assert raw.startswith(b"!<arch>\n"), "no ar archive"
    parts, at = {}, 8
    while at < len(raw):
        head = raw[at : at + 60]
        size = int(head[48:58])
        parts[head[:16].decode().strip().rstrip("/")] = raw[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return tar_files(parts["data.tar.gz"]), tar_files(parts["control.tar.gz"])


def rpm_files(raw):
    """Returns the files and the tags of an RPM package: a lead, two headers, and a compressed cpio archive."""

    def header(at):
        assert raw[at : at + 3] == b"\x8e\xad\xe8", "no header"
        entries, size = int.from_bytes(raw[at + 8 : at + 12], "big"), int.from_bytes(raw[at + 12 : at + 16], "big")
        return at + 16, at + 16 + 16 * entries, at + 16 + 16 * entries + size

    signature = header(96)[2]
    index, data, end = header(signature + -signature % 8)
    tags = {}
    for at in range(index, data, 16):
        number, _, offset = (int.from_bytes(raw[at + i : at + i + 4], "big") for i in (0, 4, 8))
        if name := RPM_TAGS.get(number):
            tags[name] = raw[data + offset : raw.index(b"\0", data + offset)].decode()

    payload = gzip.decompress(raw[end:])
    files, at = {}, 0
    while True:
        size, name_size = int(payload[at + 54 : at + 62], 16), int(payload[at + 94 : at + 102], 16)
        name = payload[at + 110 : at + 110 + name_size - 1].decode()
        start = at + 110 + name_size
        start += -start % 4
        if name == "TRAILER!!!":
            return files, tags
        files[name.removeprefix(".").lstrip("/")] = payload[start : start + size]
        at = start + size
        at += -at % 4
