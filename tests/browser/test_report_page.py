"""The report page in a real browser: offline, without errors, complete with and without JavaScript."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from icl_mechinterp.reporting import render_report
from tests.helpers_report import THEORY, make_report, make_run

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"needs a browser at {CHROMIUM}"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Two runs, one of two seeds with hostile strings wherever a user or a file can put one."""
    folder = tmp_path_factory.mktemp("page")
    plain = make_run(folder / "two-head")
    hostile = make_run(
        folder / HOSTILE.replace("/", "∕"),
        seeds=(0, 1),
        reports=[make_report(seed=seed, verdict=HOSTILE, algorithm=HOSTILE) for seed in range(2)],
        versions={HOSTILE: HOSTILE},
    )
    return render_report([plain, hostile], theory_lines=THEORY, out=folder / "report.html")


class Visit:
    """A page opened from its file, with everything the browser complained about or asked for."""

    def __init__(self, browser, file: Path, *, scripts: bool = True) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, java_script_enabled=scripts)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append("dialog") or dialog.dismiss())
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_timeout(600)


@pytest.fixture(scope="module")
def visit(browser, report) -> Iterator[Visit]:
    opened = Visit(browser, report)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def quiet_visit(browser, report) -> Iterator[Visit]:
    """The same with JavaScript blocked."""
    opened = Visit(browser, report, scripts=False)
    yield opened
    opened.context.close()


def test_asks_the_network_for_nothing_and_complains_of_nothing(visit, report):
    assert [url for url in visit.requests if not url.startswith("data:")] == [report.as_uri()]
    assert visit.complaints == []


def test_interactive_figures_are_drawn_and_swallow_nothing(visit):
    canvases = visit.page.locator("canvas")
    assert canvases.count() == 4  # two heads of the first seed of each run
    for index in range(4):
        box = canvases.nth(index).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 200
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1280
    assert visit.page.locator(".colored-tokens").count() == 4
    # what stands after the figures
    assert visit.page.get_by_role("heading", name="How it was made").count() == 2
    assert visit.page.get_by_text("optimizer: adam").count() == 2
    assert "Seed 1" in visit.page.locator("summary").all_inner_texts()[-1]


def test_canvases_have_the_colours_of_their_heads(visit):
    """The diagonal is blue for the positive head and orange for the negative one."""
    read = """canvas => {
        const context = canvas.getContext("2d");
        const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
        let blue = 0, orange = 0;
        for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3] < 200) continue;
            if (data[i + 2] > data[i] + 60) blue++;
            if (data[i] > data[i + 2] + 60) orange++;
        }
        return [blue, orange];
    }"""
    canvases = visit.page.locator("canvas")
    blue, orange = canvases.nth(0).evaluate(read)
    assert blue > 1000 > orange
    blue, orange = canvases.nth(1).evaluate(read)
    assert orange > 1000 > blue


def test_hostile_strings_stay_text(visit):
    assert "taken" not in visit.page.title().split(",")[0]
    assert visit.page.title() != "taken"
    assert visit.page.locator("img[src='x']").count() == 0
    assert HOSTILE in visit.page.locator(".verdict").last.text_content()


def test_nothing_is_wider_than_the_page(visit):
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_every_image_loads_and_has_words(visit):
    broken = visit.page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth || !i.alt).length")
    assert broken == 0
    assert visit.page.evaluate("document.images.length") == 2 * 3 + 2  # one more seed with two pictures


def test_without_scripts_static_pictures_and_all_text_are_there(visit, quiet_visit):
    page = quiet_visit.page
    assert page.locator("canvas").count() == 0
    for index in range(3):
        box = page.locator("img").nth(index).bounding_box()
        assert box["width"] > 300
        assert box["height"] > 80
    figure = page.locator(".needs-script").first
    assert not figure.is_visible()
    with_scripts, without = visit.page.locator("main").inner_text(), page.locator("main").inner_text()
    kept = [line for line in with_scripts.splitlines() if line.strip() and line in without]
    for wanted in ("zero_sum*", "undecided", "How it was made", "optimizer: adam"):
        assert any(wanted in line for line in kept)
    missing = set(with_scripts.splitlines()) - set(without.splitlines())
    assert all(line in visit.page.locator(".needs-script").all_inner_texts()[0] for line in missing)


def test_printing_leaves_the_canvases_out_and_keeps_the_pictures(visit):
    visit.page.emulate_media(media="print")
    try:
        assert not visit.page.locator(".needs-script").first.is_visible()
        assert visit.page.locator("img").first.is_visible()
    finally:
        visit.page.emulate_media(media="screen")
