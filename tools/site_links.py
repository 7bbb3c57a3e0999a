"""MkDocs hook: the pages of the repository's root, and links that work on GitHub and on the site.

README.md is the front page. A link to a file of the repository that is not a page leads to a copy
of the file under `source/` of the site.
"""

import ast
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "AGENTS.md": "agents.md",
}
"""Pages of the repository's root -> their names on the site."""

EXAMPLES = "examples"
"""The folder of scripts, of which the site has a page with a list."""

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Gives headings the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading, as on GitHub.

    >>> anchor("MFU, HFU and `loss`", "-")
    'mfu-hfu-and-loss'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", separator)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the root's pages, and every file that a page links to outside docs/."""
    linked = set()
    for source, name in ROOT_PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, name, content=(ROOT / source).read_text("utf-8")))
    if (ROOT / EXAMPLES).exists():
        files.append(File.generated(config, f"{EXAMPLES}.md", content=list_of_examples()))
    for file in files.documentation_pages():
        linked |= set(targets(file.content_string, repository_path(file.src_uri)))
    for path in sorted(linked):
        if site_path(path).startswith("source/") and (ROOT / path).is_file():
            content = (ROOT / path).read_bytes()
            files.append(File.generated(config, site_path(path), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of a page from places in the repository to places on the site."""
    here = repository_path(page.file.src_uri)
    return rewrite(markdown, here)


def list_of_examples() -> str:
    """The page that lists the scripts of examples/ with the first paragraph of their docstrings."""
    lines = ["# Examples\n\nScripts in `examples/`, each run by the tests.\n"]
    for path in sorted((ROOT / EXAMPLES).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        about = " ".join(text.split("\n\n")[0].split())
        lines.append(f"- [{path.name}](../{EXAMPLES}/{path.name}): {about}")
    return "\n".join(lines) + "\n"


def repository_path(name: str) -> str:
    """The file in the repository of a page of the site."""
    of_root = {site: source for source, site in ROOT_PAGES.items()}
    return of_root.get(name, f"docs/{name}")


def site_path(path: str) -> str:
    """The place on the site of a file of the repository.

    >>> site_path("docs/data.md"), site_path("README.md"), site_path("tools/waterfall.py")
    ('data.md', 'index.md', 'source/tools/waterfall.py')
    """
    if path == EXAMPLES:
        return f"{EXAMPLES}.md"
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def targets(markdown: str, here: str) -> list[str]:
    """The files of the repository that a page links to."""
    prose = FENCED.sub("", markdown)
    return [resolved(match[2], here) for match in LINK.finditer(prose) if is_file_link(match[2])]


def rewrite(markdown: str, here: str) -> str:
    """A page with the links of its place on the site.

    Args:
      here: the page's file in the repository.

    >>> rewrite("[data](docs/data.md#mixtures), [map](#map)", "README.md")
    '[data](data.md#mixtures), [map](#map)'
    >>> rewrite("![losses](zero.png), [planner](../planning.md)", "docs/studies/zero.md")
    '![losses](zero.png), [planner](../planning.md)'
    """
    parts = FENCED.split(markdown)
    for i in range(0, len(parts), 2):  # fenced blocks stand between
        parts[i] = LINK.sub(lambda match: _moved(match, here), parts[i])
    return "".join(parts)


def _moved(match: re.Match[str], here: str) -> str:
    if not is_file_link(match[2]):
        return match[0]
    folder = posixpath.dirname(site_path(here)) or "."
    return match[1] + posixpath.relpath(site_path(resolved(match[2], here)), folder) + match[3]


def is_file_link(target: str) -> bool:
    """Whether a link leads to a file of the repository."""
    return "://" not in target and not target.startswith("mailto:")


def resolved(target: str, here: str) -> str:
    """The file in the repository that a link of the file `here` names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
