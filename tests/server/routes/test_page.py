"""The page: its files, its requests, and what people do with it in headless Chromium."""

import base64
import re
from html.parser import HTMLParser

import pytest
from chromium import chromium, needs_chromium
from model_cases import tiny_model
from running_server import running_server

from hf_recurrent.online.settings import LearnerSettings
from hf_recurrent.server.routes.page import PAGE_FILES
from hf_recurrent.server.serving import Learning

SCRIPTS = "\n".join(file.read_text() for file in PAGE_FILES.values() if file.suffix == ".js")
HTML = PAGE_FILES["/"].read_text()
VOID = {"meta", "link", "input"}
TEXT = "naïve 日本\n\tx"


@pytest.fixture(scope="module")
def server():
    with running_server(api_key="the key") as server:
        yield server


@pytest.mark.parametrize("path", PAGE_FILES)
def test_the_files_need_no_key_and_allow_nothing_from_elsewhere(server, path):
    reply = server.request("GET", path)
    assert reply.status == 200 and reply.body == PAGE_FILES[path].read_bytes()
    kind = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}[PAGE_FILES[path].suffix]
    assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
    head = server.request("HEAD", path)
    assert head.status == 200 and not head.body
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", reply.body.decode())


def test_the_page_opens_no_other_path(server):
    for path in (
        "/page/",
        "/page/..%2froutes%2fpage.py",
        "/page/../routes/page.py",
        "/page/index.html",
        "/index.html",
    ):
        assert server.request("GET", path).status == 401
        assert server.request("GET", path, headers={"authorization": "Bearer the key"}).status == 404
    with running_server(has_page=False) as other:
        assert other.request("GET", "/").status == other.request("GET", "/page/page.js").status == 404


def test_every_request_of_the_scripts_is_a_route(server):
    requests = re.findall(r'(?:call|send)\("([A-Z]+)", ["`]([^"`]+)["`]', SCRIPTS)
    requests += [("POST", path) for path in re.findall(r"stream\(`([^`]+)`", SCRIPTS)]
    assert len(requests) >= 11
    for method, path in requests:
        path = re.sub(r"\$\{[^}]*\}", "unknown", path)
        reply = server.request(method, path, {"mark": "1", "learns": False, "text": ""}, HEADERS)
        is_known = reply.status in (200, 400) or "no such session" in reply.error()
        assert is_known, (method, path, reply.status, reply.body)


HEADERS = {"authorization": "Bearer the key"}


class Elements(HTMLParser):
    """Checks that every element is closed, and collects ids."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.uses = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert len(found) == len(attrs) and not any(name.startswith("on") or name == "style" for name in found)
        self.ids += [found["id"]] if "id" in found else []
        self.uses += [found[name] for name in ("for", "aria-describedby") if name in found]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_is_well_formed():
    elements = Elements()
    elements.feed(HTML)
    elements.close()
    assert not elements.open and len(set(elements.ids)) == len(elements.ids)
    used = set(elements.uses) | set(re.findall(r'(?:find|setting)\("([^"]+)"\)', SCRIPTS))
    assert used <= set(elements.ids)
    assert set(re.findall(r'(?:src|href)="(/[^"]*)"', HTML)) <= set(PAGE_FILES)
    assert set(re.findall(r'from "\./([^"]+)"', SCRIPTS)) <= {file.name for file in PAGE_FILES.values()}


class Page:
    """The page in a tab."""

    def __init__(self, browser, server):
        self.tab, self.faults, self.requests = browser.new_page(), [], []
        self.tab.set_default_timeout(10_000)
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("console", lambda line: self.faults.append(line.text) if "Security Policy" in line.text else None)
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(f"http://127.0.0.1:{server.port}/")
        self.rest()

    def rest(self) -> None:
        """Wait until no action runs."""
        self.tab.wait_for_selector("#stop:disabled", state="attached", timeout=20_000)

    def press(self, name: str) -> None:
        self.tab.get_by_role("button", name=name, exact=True).click()
        self.rest()

    def read(self, text: str) -> None:
        self.tab.get_by_label("Write or paste text").fill(text)
        self.press("Read")

    def text(self) -> str:
        """The characters, with the marks of newlines and tabs as pseudo-elements left out."""
        return self.tab.locator("#characters").evaluate("element => element.textContent")

    def note(self) -> str:
        return self.tab.locator("#note").inner_text()


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def open_server():
    with running_server() as server:
        server.scheduler.end_tokens = frozenset()
        yield server


@needs_chromium
def test_a_text_is_read_continued_rewound_forked_and_saved(open_server, browser, tmp_path):
    page = Page(browser, open_server)
    page.read(TEXT)
    session = open_server.new_session()
    expected = open_server.read(session, TEXT)["bits"]
    assert page.text() == TEXT and page.note() == "Read."
    titles = page.tab.locator("#characters span").evaluate_all("spans => spans.map((each) => each.title)")
    told = [each.removesuffix(" bits") for title in titles for each in title.split(", ")]
    assert told == ["not predicted", *(f"{value:.2f}" for value in expected[1:])]
    page.press("Mark this place")
    page.press("Fork")
    page.tab.locator("summary").click()
    for label, value in (("Bytes", "40"), ("Temperature", "0.9"), ("Top-k", "200"), ("Seed", "7")):
        page.tab.get_by_label(label).fill(value)
    page.press("Continue")
    sampling = {"max_tokens": 40, "temperature": 0.9, "top_k": 200, "seed": 7}
    generated = open_server.generate(session, bits=True, **sampling)
    assert page.tab.locator("#length").inner_text() == str(len(TEXT.encode()) + 40)
    count = page.tab.locator("#characters .generated").count()
    assert count == len(base64.b64decode(generated["base64"]).decode("utf-8", "surrogateescape"))
    mean = sum(expected[1:] + generated["bits"]) / (len(expected) - 1 + 40)
    assert page.tab.locator("#bits").inner_text() == f"{mean:.2f}"
    whole = page.text()
    page.press(f"↩ 1: {len(TEXT.encode())} bytes")
    assert page.text() == TEXT and page.note() == "Back at mark 1."
    page.press("Continue")
    assert page.text() == whole  # the seed
    page.press("Text 1")
    assert page.text() == TEXT
    with page.tab.expect_download() as saved:
        page.press("Save state")
    state = tmp_path / "state.safetensors"
    saved.value.save_as(state)
    page.tab.locator("#file").set_input_files(state)
    page.rest()
    page.press("Continue")
    assert page.text().startswith("continues state.safetensors ") and page.tab.locator(".generated").count() == count
    state.write_bytes(b"damaged")
    page.tab.locator("#file").set_input_files(state)
    page.rest()
    assert "error" in page.tab.locator("#note").get_attribute("class")
    assert not page.faults and all(url.startswith(("http://127.0.0.1", "blob:", "data:")) for url in page.requests)
    before = len(open_server.scheduler.store)
    page.tab.goto("about:blank")
    page.tab.wait_for_timeout(300)
    assert len(open_server.scheduler.store) == before - 3  # this tab's sessions are forgotten


@needs_chromium
def test_stop_and_errors(open_server, browser):
    page = Page(browser, open_server)
    page.tab.get_by_label("Write or paste text").fill("")
    page.press("Read")
    assert page.note() == "Write something first."
    page.read("abc")
    page.tab.locator("summary").click()
    page.tab.get_by_label("Temperature").fill("-1")
    page.press("Continue")
    assert page.note().startswith("Temperature: ")
    page.tab.get_by_label("Temperature").fill("1")
    page.tab.get_by_label("Bytes").fill("60000")
    page.tab.get_by_label("Write or paste text").press("Control+Enter")
    while page.tab.locator("#length").inner_text() == "3":
        page.tab.wait_for_timeout(20)
    page.tab.keyboard.press("Escape")
    page.rest()
    length = int(page.tab.locator("#length").inner_text().replace(",", ""))
    sessions = open_server.get("/v1/sessions")["data"]
    assert 3 < length < 60_000 and open_server.get(f"/v1/sessions/{sessions[-1]}")["bytes_read"] == length
    open_server.request("DELETE", f"/v1/sessions/{sessions[-1]}")
    page.press("Mark this place")
    assert "There is no such session" in page.note()
    assert not page.faults


@needs_chromium
def test_a_person_enters_the_key(server, browser):
    page = Page(browser, server)
    for key in ("wrong", "the key"):
        assert page.tab.get_by_label("API key").is_visible() and not page.tab.locator("#main").is_visible()
        page.tab.get_by_label("API key").fill(key)
        page.press("Open")
        assert "key is missing or wrong" in page.tab.locator("#key-note").text_content()
    assert page.tab.locator("h1").inner_text() == "tiny"
    page.read("abc")
    page.tab.reload()
    page.rest()
    assert page.tab.locator("#main").is_visible() and page.text() == ""
    assert page.tab.evaluate("[localStorage.length, document.cookie]") == [0, ""]


@pytest.mark.long
@needs_chromium
def test_it_learns_what_it_reads_many_times(browser, tmp_path):
    settings = LearnerSettings(stride=8, learning_rate=1e-3)
    with running_server(tiny_model("memora"), learning=Learning(settings, tmp_path)) as server:
        page = Page(browser, server)
        page.tab.get_by_label("Learn from what this text reads").click()
        page.rest()
        page.tab.get_by_label("Times to read it").fill("3")
        page.read("Learned by heart. ")
        assert page.note() == "Read 3 of 3 times." and page.tab.locator("polyline.learned").count() == 1
        assert server.get("/v1/learning")["bytes_read"] >= 3 * 18 - 1
        assert not page.faults
