"""The server's page in headless Chromium, used as a visitor would, and compared with the API of the same server."""

import math
import re
from pathlib import Path

import pytest
from chromium import chromium, needs_chromium
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent.online.settings import LearnerSettings
from hf_recurrent.server.serving import Learning

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("gradio", reason="Gradio is not installed")
pytestmark = [needs_chromium, pytest.mark.long]

TEXT = "def naïve(x):\n\treturn {{x}} ${1} <b> 日"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = tiny_model("memora")
    model.generation_config.eos_token_id = None
    learning = Learning(LearnerSettings(learning_rate=1e-2), tmp_path_factory.mktemp("learned"))
    with running_server(model, learning=learning, has_page=True, api_key="the key") as server:
        server._headers["authorization"] = "Bearer the key"
        yield server


class Visit:
    """The page in a tab, as a visitor uses it."""

    def __init__(self, tab, address: str):
        self.tab, self.faults, self.requests = tab, [], []
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        tab.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.goto(address)

    def press(self, name: str) -> None:
        self.tab.get_by_role("button", name=name, exact=True).click()

    def write(self, text: str) -> None:
        self.tab.get_by_label("Write or paste text").fill(text)

    def expect_note(self, text: str | re.Pattern) -> None:
        playwright.expect(self.tab.locator("#page-note")).to_have_text(text, timeout=90_000)

    def expect_length(self, count: int) -> None:
        playwright.expect(self.tab.locator("#length")).to_have_text(f"{count:,}", timeout=90_000)

    def read(self, text: str) -> None:
        self.write(text)
        self.press("Read")
        self.expect_note("Read.")

    def set(self, label: str, value: float) -> None:
        box = self.tab.get_by_label(f"number input for {label}")
        box.fill(str(value))
        box.press("Enter")

    def characters(self) -> list[tuple[str, str, str]]:
        """Text, classes and title of every character."""
        spans = self.tab.locator("#page-text span[title]")
        return [
            tuple(row) for row in spans.evaluate_all("all => all.map((s) => [s.textContent, s.className, s.title])")
        ]


@pytest.fixture
def visit(browser, server):
    context = browser.new_context(viewport={"width": 1200, "height": 1000})
    address = f"http://127.0.0.1:{server.port}/"
    visit = Visit(context.new_page(), address)
    visit.tab.get_by_label("API key of this server").fill("the key")
    visit.press("Open the page")
    visit.expect_note(re.compile("Press Continue"))
    yield visit
    assert visit.faults == []
    assert [url for url in visit.requests if not url.startswith((address, "data:", "blob:"))] == []
    context.close()


def test_colours_are_the_bits_of_the_api(visit, server):
    visit.read(TEXT)
    session = server.new_session()
    bits = server.read(session, TEXT)["bits"]
    shown = visit.characters()
    assert "".join(text for text, _, _ in shown) == TEXT
    assert shown[0][1:] == ("none", "not predicted")
    assert shown[1][2] == f"{bits[1]:.2f} bits"
    assert shown[6][0] == "ï" and shown[6][2] == f"{bits[6]:.2f}, {bits[7]:.2f} bits"
    known = [value for value in bits if value is not None and not math.isnan(value)]
    playwright.expect(visit.tab.locator("#bits")).to_have_text(f"{sum(known) / len(known):.2f}")
    assert len(server.get("/v1/sessions")["data"]) == 1  # the page's are not listed


def test_continue_fork_rewind_save_and_load(visit, server, tmp_path):
    visit.tab.get_by_role("button", name="How it continues").click()
    visit.set("Bytes", 40)
    visit.set("Temperature", 0)
    visit.read("import os")
    visit.press("Mark this place")
    visit.expect_note("Marked: 1: after 9 bytes.")
    visit.press("Continue")
    visit.expect_length(49)
    whole = visit.characters()
    assert ["generated" in kinds for _, kinds, _ in whole][:10] == [False] * 9 + [True]
    session = server.new_session()
    server.read(session, "import os")
    expected = server.generate(session, max_tokens=40, temperature=0)
    assert (
        "".join(text for text, _, _ in whole)
        == "".join(
            character if character.isprintable() or character in "\n\t" else f"{ord(character):02X}"
            for character in "import os" + expected["text"]
        )
        or "\ufffd" in expected["text"]
    )

    visit.press("Rewind")
    visit.expect_note("Back at mark 1: after 9 bytes.")
    visit.expect_length(9)
    with visit.tab.expect_download() as download:
        visit.press("Save state")
    path = Path(tmp_path, "mine.safetensors")
    download.value.save_as(path)
    session = server.post("/v1/sessions/from_state", path.read_bytes())["id"]
    assert server.generate(session, max_tokens=40, temperature=0)["base64"] == expected["base64"]

    visit.press("Fork")
    visit.expect_note("Text 2 is a copy of Text 1.")
    visit.press("Continue")
    visit.expect_length(49)
    assert visit.characters() == whole
    visit.tab.get_by_label("Text 1").check()
    visit.expect_length(9)

    with visit.tab.expect_file_chooser() as chooser:
        visit.press("Load state")
    chooser.value.set_files(path)
    visit.expect_note("Text 3 continues mine.safetensors.")
    visit.press("Continue")
    visit.expect_length(40)
    assert [text for text, _, _ in visit.characters()] == [text for text, _, _ in whole[9:]]

    path.write_bytes(path.read_bytes()[:-1])
    with visit.tab.expect_file_chooser() as chooser:
        visit.press("Load state")
    chooser.value.set_files(path)
    visit.expect_note(re.compile(r"`file` is damaged"))


def test_learning_lowers_the_bits(visit):
    visit.tab.get_by_label("Learn from what this text reads").check()
    visit.expect_note("The model learns from what this text reads.")
    visit.set("Times to read it", 12)
    visit.write("abcdefgh" * 16)
    visit.press("Read")
    visit.expect_note("Read 12 times.")
    line = visit.tab.locator("#page-curve polyline.learned")
    heights = [float(pair.split(",")[1]) for pair in line.get_attribute("points").split()]
    assert heights[-1] > heights[0] + 20  # of 100, from the top


def test_a_long_text_stops(visit):
    visit.tab.get_by_role("button", name="How it continues").click()
    visit.set("Bytes", 2000)
    visit.press("Continue")
    playwright.expect(visit.tab.locator("#page-text .generated").first).to_be_visible(timeout=90_000)
    visit.press("Stop")
    playwright.expect(visit.tab.locator("#page-note")).to_have_text("", timeout=90_000)
    assert len(visit.characters()) < 2000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_readable_and_the_page_fits(browser, server, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 360, "height": 800})
    visit = Visit(context.new_page(), f"http://127.0.0.1:{server.port}/")
    visit.tab.get_by_label("API key of this server").fill("the key")
    visit.press("Open the page")
    visit.expect_note(re.compile("Press Continue"))
    assert visit.tab.evaluate("document.documentElement.scrollWidth") <= 360
    lights = visit.tab.evaluate(
        """() => {
          const light = (text) => {
            const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((value) => {
              const part = value / 255;
              return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const page = getComputedStyle(document.body).backgroundColor;
          return Array.from(document.querySelectorAll("#legend li[class]"), (item) => {
            const { color, backgroundColor } = getComputedStyle(item);
            return [light(color), light(/, 0\\)$/.test(backgroundColor) ? page : backgroundColor)];
          });
        }"""
    )
    contrasts = [(max(pair) + 0.05) / (min(pair) + 0.05) for pair in lights]
    assert len(contrasts) == 9 and min(contrasts) >= 4.5  # as WCAG asks
    backgrounds = [background for _, background in lights]
    assert backgrounds == sorted(backgrounds, reverse=scheme == "light")
    context.close()
