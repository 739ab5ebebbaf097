"""check_image.py LAYOUT DIST VERSION: reads the OCI layout of the image. The digests match, the platforms, labels and configuration are
complete, each layer is the program of its platform, and that of this machine runs as the user of the image without any other file."""

import gzip
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

from packages import tar_files

layout, dist, version = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
here = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
user = "65532:65532"


def expect(ok, text):
    if not ok:
        sys.exit(text)


def blob(descriptor):
    content = (layout / "blobs" / descriptor["digest"].replace(":", "/")).read_bytes()
    found = "sha256:" + hashlib.sha256(content).hexdigest()
    expect((found, len(content)) == (descriptor["digest"], descriptor["size"]), f"{descriptor} has the digest {found}")
    return content


def run_alone(program):
    """Runs the program in a directory that contains nothing else, as the user of the image. It returns the output."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        path = pathlib.Path(root) / "outrelay"
        path.write_bytes(program)
        path.chmod(0o755)
        command = [path, "version", "--json"]
        if os.geteuid() == 0 and shutil.which("chroot"):
            command = ["chroot", f"--userspec={user}", root, "/outrelay", "version", "--json"]
        else:
            print("   note: no root or no chroot: the program of the image runs with the files of this machine")
        return subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True).stdout


(top,) = json.loads((layout / "index.json").read_text())["manifests"]
index = json.loads(blob(top))
manifests = {f"{m['platform']['os']}/{m['platform']['architecture']}": m for m in index["manifests"]}
wanted = ["linux/amd64"] if "ONE_ARCHITECTURE" in os.environ else ["linux/amd64", "linux/arm64"]
expect(sorted(manifests) == wanted, f"platforms {sorted(manifests)}")

for name, descriptor in manifests.items():
    arch = name.removeprefix("linux/")
    manifest = json.loads(blob(descriptor))
    image = json.loads(blob(manifest["config"]))
    config, (layer,) = image["config"], manifest["layers"]
    expect((image["os"], image["architecture"]) == ("linux", arch), f"{name} has the configuration {image}")
    expect((config["User"], config["Entrypoint"], config["Cmd"], list(config["ExposedPorts"])) == (user, ["/outrelay"], ["run"], ["9464/tcp"]), f"{name}: {config}")

    for key in ("title", "description", "source", "licenses", "version", "revision", "created"):
        expect(config["Labels"].get("org.opencontainers.image." + key), f"{name} has no label {key}")
    expect(config["Labels"]["org.opencontainers.image.version"] == version, f"{name}: {config['Labels']}")
    expect(manifest["annotations"] == index["annotations"] == config["Labels"], f"{name} has other annotations than labels")

    tar = gzip.decompress(blob(layer))
    expect(image["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(tar).hexdigest()], f"{name}: the layer has another digest than {image['rootfs']}")
    files = tar_files(tar)
    (built,) = dist.glob(f"*_linux_{arch}*/outrelay")
    expect(list(files) == ["outrelay"] and files["outrelay"] == built.read_bytes(), f"{name} contains {list(files)}, or another program")
    if arch == here:
        told = json.loads(run_alone(files["outrelay"]))
        expect((told["version"], told["platform"]) == (version, name), f"the program of the image prints {told}")

print(f"   image {version}: {', '.join(sorted(manifests))}, {top['digest']}")
