"""Hooks of the site: pages and pictures of the repository outside docs/ join it, and links between all of them hold.

A link to another Markdown page or picture leads to its copy on the site. A link to code leads to the repository at
`repo_url`; while the address is unknown, its text alone is shown.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
HOME = "README.md"
SOURCES = ROOT / "build" / "docs_sources"
ON_SITE = (".md", ".png", ".svg")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)


def site_path(path: str) -> str:
    """Return the place on the site of a file of the repository."""
    return "index.md" if path == HOME else path.removeprefix(DOCS)


def repository_path(place: str) -> str:
    """Return the file of the repository at a place on the site."""
    if place == "index.md":
        return HOME
    return f"{DOCS}{place}" if (ROOT / DOCS / place).exists() else place


def resolved(target: str, page: str) -> tuple[str, str]:
    """Split a link on a page of the repository into a path from its root and an anchor."""
    file, mark, anchor = target.partition("#")
    path = os.path.normpath(PurePosixPath(page).parent / file) if file else page
    return path, f"{mark}{anchor}"


def is_relative(target: str) -> bool:
    """Check that a link leads to a file of the repository."""
    return not re.match(r"[a-z]+:|#", target)


def linked_files(page: str) -> list[str]:
    """List the files of the site that a page links to."""
    text = FENCE.sub("", (ROOT / page).read_text())
    paths = (resolved(match["target"], page)[0] for match in LINK.finditer(text) if is_relative(match["target"]))
    return [path for path in paths if path.endswith(ON_SITE)]


def on_startup(**_: Any) -> None:
    """Copy the package for mkdocstrings, with an `__init__.py` in every folder: it reads no folder without one."""
    if SOURCES.exists():
        shutil.rmtree(SOURCES)
    for file in (ROOT / "hybridtron").rglob("*.py"):
        copy = SOURCES / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        (copy.parent / "__init__.py").touch()
        shutil.copy(file, copy)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the home page, and every page and picture that links lead to, from wherever they are."""
    from mkdocs.structure.files import File  # the links' tests need no mkdocs

    waiting = [HOME, *(f"{DOCS}{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        if not page.startswith(DOCS):
            files.append(File.generated(config, site_path(page), abs_src_path=str(ROOT / page)))
        if page.endswith(".md"):
            new = [path for path in dict.fromkeys(linked_files(page)) if path not in seen]
            seen.update(new)
            waiting += new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Point links at the site or at the repository."""
    place = page.file.src_uri
    source = repository_path(place)

    def point(match: re.Match[str]) -> str:
        if not is_relative(match["target"]):
            return match[0]
        path, anchor = resolved(match["target"], source)
        if path.endswith(ON_SITE):
            target = os.path.relpath(site_path(path), PurePosixPath(place).parent) + anchor
        elif config.repo_url:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            target = f"{config.repo_url.rstrip('/')}/{kind}/HEAD/{path}{anchor}"
        else:
            return match["text"]
        return f"{match['image']}[{match['text']}]({target})"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(point, part) for part in parts)
