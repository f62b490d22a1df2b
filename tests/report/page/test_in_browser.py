"""Lays out pages in a browser at the widths of a phone and a desktop, all sections unfolded."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from jaxmorph.report.page import write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.timeout(120),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here"),
]

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--virtual-time-budget=5000",
)  # fmt: skip
WIDTHS = (390, 1280)  # of frames, since a browser window is never as narrow as a phone
PROBE = """<script>
addEventListener("load", () => {
  const measured = [...document.querySelectorAll("iframe")].map(({contentDocument: page}) => {
    for (const folded of page.querySelectorAll("details")) folded.open = true;
    const width = page.documentElement.clientWidth;
    const out = [...page.body.querySelectorAll("*")]
      .filter(e => !e.parentElement.closest(".scroll, pre"))
      .filter(e => e.getBoundingClientRect().right > width + 1)
      .map(e => e.outerHTML.slice(0, 80));
    const narrow = [...page.querySelectorAll("main svg")]
      .filter(e => e.getBoundingClientRect().width < 100).length;
    return {width, page: page.documentElement.scrollWidth, out, narrow};
  });
  document.body.setAttribute("data-measured", JSON.stringify(measured));
});
</script>"""


def _laid_out(page: Path, profile: Path) -> list[dict]:
    """What a browser measures of a page in frames of each width."""
    source = escape(page.read_text())
    frames = (
        f'<iframe width="{width}" height="844" srcdoc="{source}"></iframe>' for width in WIDTHS
    )
    framed = page.with_name("framed.html")
    framed.write_text(f"<!doctype html><body>{''.join(frames)}{PROBE}</body>")
    words = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", "--dump-dom", framed.as_uri()]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True)
    found = re.search(r'data-measured="([^"]*)"', ran.stdout)
    assert found is not None, ran.stderr
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("kind", ["morphed_run", "compared"])
def test_no_page_is_wider_than_its_window(kind, request, tmp_path):
    page = write_report(request.getfixturevalue(kind))
    measured = _laid_out(page, tmp_path / "profile")
    assert measured == [{"width": width, "page": width, "out": [], "narrow": 0} for width in WIDTHS]
