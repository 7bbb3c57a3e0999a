"""The documentation site builds without warnings, needs no network, and has no broken link."""

import html.parser
import os
import pathlib
import subprocess
import sys
import urllib.parse

import pytest

from tools import site_links

ROOT = pathlib.Path(__file__).parents[2]
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
"""Element -> its attribute with a file that a browser loads with the page."""


class Page(html.parser.HTMLParser):
    """The links and anchors of a page, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[name] or "" for name in ("id", "name") if name in values}
        if tag == "a" and (target := values.get("href")):
            self.links.append(target)
        if target := values.get(LOADED.get(tag, "")):
            self.loaded.append(target)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.proof
def test_the_site_has_no_broken_link_and_loads_nothing_from_the_network(site):
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    pages.pop(site / "404.html")  # its links begin at the root of a server
    broken = []
    for path, page in pages.items():
        assert not [target for target in page.loaded if "//" in target], path
        for target in [*page.links, *page.loaded]:
            url = urllib.parse.urlsplit(target)
            if url.scheme in ("http", "https", "mailto", "data"):
                continue
            file = path.parent / urllib.parse.unquote(url.path) if url.path else path
            file = (file / "index.html" if file.is_dir() else file).resolve()
            anchors = pages[file].anchors if file in pages else {""}
            if not file.is_file() or (url.fragment and url.fragment not in anchors):
                broken.append(f"{path.name}: {target}")
    assert not broken
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} < {path.stem for path in pages}


def test_links_lead_to_the_same_file_on_the_site():
    def moved(target: str, here: str) -> str:
        return site_links.rewrite(f"[text]({target})", here)[7:-1]

    assert moved("docs/data.md#mixtures", "README.md") == "data.md#mixtures"
    assert moved("#map", "README.md") == "#map"
    assert moved("CONTRIBUTING.md", "README.md") == "contributing.md"
    assert moved("../README.md", "docs/data.md") == "index.md"
    assert moved("zb_h1.png", "docs/pipelines.md") == "zb_h1.png"
    assert moved("examples", "README.md") == "examples.md"
    assert moved("../tools/waterfall.py", "docs/planning.md") == "source/tools/waterfall.py"
    assert moved("https://example.org/a.md", "README.md") == "https://example.org/a.md"
    fenced = "```\n[text](docs/data.md)\n```"
    assert site_links.rewrite(fenced, "README.md") == fenced


def test_anchors_are_those_of_github():
    assert site_links.anchor("MFU, HFU and `loss`", "-") == "mfu-hfu-and-loss"
    assert site_links.anchor("Over tensor ranks - why", "-") == "over-tensor-ranks---why"
