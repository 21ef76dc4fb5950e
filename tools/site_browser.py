"""Opens the pages of the site in Chromium, in a wide and a phone's window, and lists problems.

    python tools/site_browser.py out/site [PAGE...] [--pictures FOLDER]     (all pages)

Problems are errors and warnings on the console, requests that fail or leave the site, and pages
wider than their window. The browser is the system's, not playwright's own.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WINDOWS = {"wide": (1400, 1000), "phone": (390, 844)}
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"


class Server(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Does not log requests."""


def look(site: Path, pages: list[str], pictures: Path | None) -> Iterator[str]:
    """Yields a line for each problem."""
    handler = functools.partial(Server, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            for window, (width, height) in WINDOWS.items():
                page = browser.new_page(viewport={"width": width, "height": height})
                wrong = watch(page, home)
                for name in pages:
                    page.goto(home + name, wait_until="networkidle")
                    if page.evaluate(TOO_WIDE) > 0:
                        wrong.append("wider than the window")
                    if pictures:
                        picture = f"{window}_{name.replace('/', '_')}.png"
                        page.screenshot(path=pictures / picture, full_page=True)
                    yield from (f"{window} {name}: {text}" for text in wrong)
                    wrong.clear()
            browser.close()
        server.shutdown()


def watch(page: Page, home: str) -> list[str]:
    """Returns a list that collects the problems of a page."""
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(f"{request.url} failed"))
    inside = (home, "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(inside) else wrong.append(r.url))
    return wrong


def chromium() -> str | None:
    """The path of the system's browser, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--pictures", type=Path, help="where to write one of each page and window")
    given = parser.parse_args()
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
    every = sorted(path.relative_to(given.site).as_posix() for path in given.site.rglob("*.html"))
    wrong = list(look(given.site, given.pages or every, given.pictures))
    print("\n".join(wrong) or f"{len(given.pages or every)} pages are right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
