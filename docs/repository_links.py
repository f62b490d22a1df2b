"""A hook of MkDocs: links from a page to files of the repository that are not part of the site.

On GitHub `[cli/app.py](../../jaxmorph/cli/app.py)` opens the file. The site has no such file, so
the link points into `repo_url` where `mkdocs.yml` sets one; otherwise only its text stays.
"""

import logging
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>\.\.[^)#\s]*)\)")
_log = logging.getLogger("mkdocs.hooks.repository_links")  # in strict mode a warning is an error


def on_page_markdown(markdown: str, /, *, page: Any, config: Any, files: Any) -> str:
    """The page's text with links that the site can resolve."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def resolved(match: re.Match[str]) -> str:
        target = (folder / match["path"]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, match["path"])
        if not config.repo_url:
            return match["text"]
        path = target.relative_to(docs.parent).as_posix()
        return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{path})"

    return _LINK.sub(resolved, markdown)
