"""A hook of mkdocs: the site loads everything from itself, so it works offline, and sends nothing to other hosts.

The theme loads two libraries from a public host. .ci/docs downloads them into the folder OUTRELAY_DOCS_SCRIPTS. Next to the link to the
repository, the theme shows numbers that it requests from the host of the repository: the hook removes the mark that makes it do so.
"""

import os
import pathlib
import re
import shutil

from mkdocs.exceptions import PluginError

LIBRARIES = {
    "https://unpkg.com/mermaid@11/dist/mermaid.min.js": "mermaid.min.js",
    "https://unpkg.com/resize-observer-polyfill": "ResizeObserver.global.js",
}
# The theme writes the path from the page to the root of the site into each page.
LOCAL = 'new URL(JSON.parse(document.getElementById("__config").textContent).base+"/assets/javascripts/{}",location).href'
LOADS = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"')
REMOTE_SCRIPT = re.compile(r'"https?://(?:unpkg\.com/[^"]*|[^"]+\.js)"')
# The scripts of the theme request the numbers for each element with this mark, and for nothing else.
NUMBERS = ' data-md-component="source"'
REQUESTS = re.compile(r"[`\"']https?://[^`\"']*(?:\bapi\b|\$\{)[^`\"']*[`\"']")
KNOWN_REQUESTS = {"api.github.com", "/api/v4/projects/"}


def on_post_build(config, **_):
    site = pathlib.Path(config["site_dir"])
    scripts = site / "assets" / "javascripts"
    for name in LIBRARIES.values():
        shutil.copy(pathlib.Path(os.environ["OUTRELAY_DOCS_SCRIPTS"]) / name, scripts / name)
    for bundle in scripts.glob("bundle.*.js"):
        text = bundle.read_text()
        for url, name in LIBRARIES.items():
            text = text.replace(f'"{url}"', LOCAL.format(name))
        bundle.write_text(text)
        check(bundle, REMOTE_SCRIPT.findall(text))
        if 'me("source").map(' not in text.replace(" ", ""):
            raise PluginError(f"{bundle} requests the numbers of the repository in another way: look how to prevent it")
        check(bundle, [url for url in REQUESTS.findall(text) if not any(known in url for known in KNOWN_REQUESTS)])
    for page in site.rglob("*.html"):
        text = page.read_text().replace(NUMBERS, "")
        page.write_text(text)
        check(page, LOADS.findall(text))


def check(file, loaded):
    if loaded:
        raise PluginError(f"{file} loads {', '.join(loaded)} from another host: serve the file from the site")
