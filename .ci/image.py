"""image.py DIST VERSION REVISION CREATED LAYOUT: writes the image of a release as an OCI layout, from the programs that goreleaser has
built. The image has no base: the program is static and contains its certificate authorities. It needs no container engine, and the same
programs always give the same bytes."""

import gzip
import hashlib
import io
import json
import os
import pathlib
import sys
import tarfile

dist, version, revision, created, layout = sys.argv[1:]
dist, layout = pathlib.Path(dist), pathlib.Path(layout)

labels = {
    f"org.opencontainers.image.{key}": value
    for key, value in {
        "title": "outrelay",
        "description": "Relays the events of MongoDB outbox collections to Kafka",
        "url": "https://github.com/outrelay/outrelay",
        "source": "https://github.com/outrelay/outrelay",
        "documentation": f"https://github.com/outrelay/outrelay/blob/v{version}/README.md",
        "licenses": "Apache-2.0",
        "version": version,
        "revision": revision,
        "created": created,
    }.items()
}


def write_blob(kind, content):
    """Writes a blob, and returns its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(content)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}


def write_json(kind, document):
    return write_blob(kind, json.dumps(document, separators=(",", ":")).encode())


def layer_of(program):
    """Returns a tar archive with the program alone."""
    entry = tarfile.TarInfo("outrelay")
    entry.size, entry.mode = program.stat().st_size, 0o755
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar, program.open("rb") as source:
        tar.addfile(entry, source)
    return out.getvalue()


(layout / "blobs" / "sha256").mkdir(parents=True)
manifests = []
for arch in ("amd64",) if "ONE_ARCHITECTURE" in os.environ else ("amd64", "arm64"):
    (program,) = dist.glob(f"*_linux_{arch}*/outrelay")
    layer = layer_of(program)
    config = write_json(
        "config.v1+json",
        {
            "created": created,
            "architecture": arch,
            "os": "linux",
            "config": {"User": "65532:65532", "ExposedPorts": {"9464/tcp": {}}, "Entrypoint": ["/outrelay"], "Cmd": ["run"], "Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
            "history": [{"created": created, "created_by": "outrelay " + version}],
        },
    )
    layers = [write_blob("layer.v1.tar+gzip", gzip.compress(layer, mtime=0))]
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": layers, "annotations": labels}
    manifests.append({**write_json("manifest.v1+json", manifest), "platform": {"architecture": arch, "os": "linux"}})

index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests, "annotations": labels}
top = {**write_json("index.v1+json", index), "annotations": {"org.opencontainers.image.ref.name": version}}
(layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [top]}))
(layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
