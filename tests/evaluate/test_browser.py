"""The page of an evaluation in headless Chromium: no error in its console, every picture shown, nothing loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hybridtron.evaluate.page import page
from hybridtron.evaluate.pictures import by_length, heat_map
from hybridtron.evaluate.results import Evaluated, main_rows, rows_of

pytestmark = pytest.mark.slow  # starts a browser
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"
LOOK = """<script>addEventListener("load", () => console.log("found " + JSON.stringify({
  pictures: [...document.images].map(image => image.naturalWidth > 100 && image.complete),
  rows: document.querySelectorAll("tbody tr").length,
  samples: document.querySelectorAll("pre").length,
  wide: document.documentElement.scrollWidth > innerWidth,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
})))</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    path_of_browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path_of_browser is None:
        pytest.skip(f"there is no {BROWSERS[0]} here: `apt-get install chromium` gets one")
    return path_of_browser


def said(browser: str, html: str, folder: Path) -> list[str]:
    """Return a page's console output and the browser's messages about it. No host name resolves."""
    (folder / "page.html").write_text(html)
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1000,1400", f"--screenshot={folder / 'shot.png'}", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert (folder / "shot.png").stat().st_size > 2000
    return re.findall(r":CONSOLE[^\]]*\] \"(.*)\", source", done.stderr)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a page with a heat map and lines. Its texts would break a page without escaping."""
    folder = tmp_path_factory.mktemp("page")
    lines = [
        {
            **{"key": f"{length}/{number}", "task": "passkey", "length": length, "seed": 0, "index": number},
            **{"metrics": {"exact": float(number % 2)}, "depth": number / 10, "prompt_tokens": length},
            **{"asked": "</pre><script>console.error('run')</script>", "wanted": "<b>7", "written": "&lt;\x00 ☕"},
        }
        for length in (64, 128)
        for number in range(11)
    ]
    about = {"step": 4, "seq_len": 64, "kernels": {"scan": "native"}}
    evaluated = Evaluated("a <run>", folder, about, rows_of(lines, about), lines, ["vt at 64: too short"])
    tasks = main_rows(evaluated.rows)
    heat_map("passkey", tasks["passkey"], 64, folder / "depth.png")
    by_length({evaluated.name: tasks}, [64], folder / "length.png")
    evaluated.pictures.update({"by depth": folder / "depth.png", "by length": folder / "length.png"})
    return page("a <run>", [evaluated])


def test_the_page_opens_without_an_error(browser: str, html: str, tmp_path: Path) -> None:
    (state,) = said(browser, html.replace("</body>", f"{LOOK}</body>"), tmp_path)
    assert json.loads(state.removeprefix("found ")) == {
        "pictures": [True, True], "rows": 2, "samples": 4, "wide": False, "loaded": [],
    }  # fmt: skip


def test_an_error_of_the_page_is_noticed(browser: str, html: str, tmp_path: Path) -> None:
    """A failing script and a picture on another host are noticed."""
    broken = html.replace(
        "</body>", f"<img src='http://hybridtron.invalid/x.png'><script>absent()</script>{LOOK}</body>"
    )
    error, printed_state = said(browser, broken, tmp_path)
    assert "absent is not defined" in error
    state = json.loads(printed_state.removeprefix("found "))
    assert (state["pictures"], state["loaded"]) == ([True, True, False], ["http://hybridtron.invalid/x.png"])
