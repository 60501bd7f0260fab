"""The site and a report in a real browser, which TRTSPEC_CHROMIUM names.

No page is wider than a desktop, a tablet or a phone, no script fails, and every link of the site
leads to a page, and a place on it, that is there.
"""

import functools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from tests.command_line import ran
from tools.browser import Browser

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = os.environ.get("TRTSPEC_CHROMIUM", "")
ZENSICAL = Path(sys.executable).parent / "zensical"
WIDTHS = (1440, 820, 390)
SCREENS = ((1440, False), (1440, True), (390, False), (390, True))
PAPER = ((704, False), (704, True))  # A4 within its margins
REPORT = ROOT / "docs" / "samples" / "report.html"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ZENSICAL.exists(), reason="zensical, which builds the site, is not installed"
    ),
]
browser_named = pytest.mark.skipif(
    not shutil.which(CHROMIUM), reason="TRTSPEC_CHROMIUM does not name a Chromium"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it, of a copy: the build writes beside its configuration."""
    place = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "mkdocs.yml", place)
    shutil.copytree(ROOT / "docs", place / "docs")
    done = ran(ZENSICAL, "build", "--clean", cwd=place)
    assert done.status == 0 and "No issues found" in done.stdout + done.stderr, done
    return place / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def pages(site: Path) -> list[str]:
    found = [page.parent.relative_to(site).as_posix() for page in sorted(site.rglob("index.html"))]
    return ["" if page == "." else f"{page}/" for page in found]


@browser_named
def test_no_page_overflows_and_no_script_fails(site: Path, address: str) -> None:
    wrong, visits = [], 0
    for dark in (False, True):  # a new browser, because the site remembers the scheme
        with Browser(CHROMIUM) as browser:
            for width in WIDTHS:
                browser.screen(width, dark=dark, mobile=width < 800)
                for page in pages(site):
                    browser.visit(address + page)
                    visits += 1
                    scheme = browser.value("document.body.dataset.mdColorScheme")
                    if (
                        browser.overflow() > 0
                        or browser.errors
                        or scheme != ("slate" if dark else "default")
                    ):
                        wrong.append(
                            (page, width, dark, scheme, browser.overflow(), browser.errors)
                        )
            browser.value(
                "document.body.insertAdjacentHTML('beforeend', "
                "'<div style=\"width: 3000px\">x</div>')"
            )
            assert browser.overflow() > 1000, "the measure itself"
    print(f"\n{len(pages(site))} pages, {visits} visits, {len(wrong)} with overflow or errors")
    assert not wrong


@browser_named
@pytest.mark.parametrize("media", ["", "print"])
def test_the_report_fits_screen_and_paper(media: str) -> None:
    with Browser(CHROMIUM) as browser:
        for width, dark in PAPER if media else SCREENS:
            browser.screen(width, dark=dark, media=media, mobile=width < 800)
            browser.visit(REPORT.as_uri())
            assert browser.overflow() <= 0 and not browser.errors, (width, dark)
            if media == "print":  # dark ink on white paper, whatever the screen's scheme is
                assert (
                    browser.value("getComputedStyle(document.body).backgroundColor")
                    == "rgb(255, 255, 255)"
                )


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names |= {value for key in ("id", "name") if (value := given.get(key))}
        self.links += [value for key in ("href", "src") if (value := given.get(key))]


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    read = {
        page.relative_to(site).as_posix(): Page(page.read_text("utf-8"))
        for page in site.rglob("*.html")
    }
    broken, count = [], 0
    for name, page in read.items():
        if name == "404.html":  # its links are of the site's root
            continue
        for link in page.links:
            place, anchor = urldefrag(urljoin(f"http://site/{name}", link))
            if not place.startswith("http://site/"):
                continue
            count += 1
            path = unquote(place.removeprefix("http://site/").partition("?")[0])
            path += "index.html" if path.endswith("/") or not path else ""
            if not (site / path).is_file() or (
                anchor and path in read and unquote(anchor) not in read[path].names
            ):
                broken.append(f"{name}: {link}")
    print(f"\n{count} links on {len(read)} pages, {len(broken)} broken")
    assert not broken and count > 1000
