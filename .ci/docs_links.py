"""A hook of mkdocs: links to files outside of docs, and to folders, lead to the repository.

In the repository these links are relative, and test/coverage checks that their targets exist.
"""

import os
import posixpath
import re

LINK = re.compile(r"(?<!!)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown, page, config, files, **_):
    folder = posixpath.dirname(page.file.src_uri)
    known = {f.src_uri for f in files}

    def absolute(match):
        target = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if target.startswith("docs/") and (target[len("docs/"):] in known or not os.path.isdir(target)):
            return match[0]  # mkdocs checks it
        return f"]({config['repo_url']}/blob/main/{target}{match[2] or ''})"

    return LINK.sub(absolute, markdown)
