"""The page of examples/browser in headless Chromium, compared with the model in torch."""

import functools
import http.server
import json
import math
import random
import shutil
import struct
import threading
from pathlib import Path

import pytest
import torch
from chromium import chromium, needs_chromium
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_recurrent as hf

PAGE = Path(__file__).resolve().parents[2] / "examples" / "browser"
TEXT = "def naïve(x):\n\treturn x  # 日本語, 👩‍👩‍👧 and e\u0301\n"

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytestmark = [
    needs_chromium,
    pytest.mark.skipif(
        not (PAGE / "onnxruntime" / "VERSION").is_file(), reason="run python examples/browser/prepare.py first"
    ),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = hf.config_from_preset("memora-tiny", hidden_size=24, state_size=40, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so that bytes are of different surprise
            if weight.dim() == 2:
                weight.mul_(2 if "embed" in name else 3)
    return model


@pytest.fixture(scope="module")
def site(model, tmp_path_factory):
    """A copy of the page with the model; yields (folder, address)."""
    from hf_recurrent.export.exported_step import save_exported_step

    folder = tmp_path_factory.mktemp("site") / "page"
    shutil.copytree(PAGE, folder, ignore=shutil.ignore_patterns("model", "onnxruntime", "__pycache__"))
    (folder / "onnxruntime").symlink_to(PAGE / "onnxruntime")
    save_exported_step(model, folder / "model", runtime="onnx", tokenizer=hf.ByteTokenizer())
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


class Page:
    """The page in a tab of its own, used as a reader would."""

    def __init__(self, tab, address):
        self.tab, self.faults, self.requests = tab, [], []
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.goto(address)

    def status(self, kind: str | None = None) -> str:
        """The status line, once it is of that kind."""
        line = self.tab.locator("#status")
        if kind is not None:
            playwright.expect(line).to_have_attribute("data-kind", kind, timeout=20_000)
        return line.inner_text()

    def rest(self) -> None:
        """Wait until the model has read and written everything, and it is drawn."""
        playwright.expect(self.tab.get_by_role("button", name="Stop")).to_be_disabled(timeout=30_000)
        self.draw()

    def draw(self) -> None:
        self.tab.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def write(self, text: str) -> None:
        self.tab.get_by_label("Write or paste text").fill(text)
        self.rest()

    def generate(self, count: int, temperature: float = 0, seed: int = 1) -> None:
        for label, value in (("Bytes", count), ("Temperature", temperature), ("Seed", seed)):
            self.tab.get_by_label(label, exact=True).fill(str(value))
        self.tab.get_by_role("button", name="Continue").click()
        self.rest()

    def record(self) -> tuple[bytes, list[float], list[int]]:
        """Bytes, their bits, and 1 where the model wrote them."""
        bytes_, bits, generated = self.tab.evaluate(
            """async () => {
              const { record } = await import("./app.js");
              const { bytes, bits, generated, length } = record;
              return [bytes, bits, generated].map((values) => Array.from(values.subarray(0, length), String));
            }"""
        )
        return bytes(map(int, bytes_)), list(map(float, bits)), list(map(int, generated))

    def characters(self) -> list[tuple[str, str]]:
        """Text and classes of every character in sight."""
        self.draw()
        spans = self.tab.locator("#text span[data-start]")
        return [tuple(pair) for pair in spans.evaluate_all("all => all.map((s) => [s.textContent, s.className])")]

    def load(self, content: bytes, name: str = "state.safetensors") -> None:
        file = {"name": name, "mimeType": "application/octet-stream", "buffer": content}
        self.tab.locator("#load-input").set_input_files(file)

    def save(self, path: Path) -> Path:
        with self.tab.expect_download() as download:
            self.tab.get_by_role("button", name="Save state").click()
        download.value.save_as(path)
        return path


@pytest.fixture
def page(browser, site):
    tab = browser.new_page()
    page = Page(tab, site[1])
    playwright.expect(tab.get_by_role("button", name="Continue")).to_be_enabled(timeout=20_000)
    yield page
    assert page.faults == []
    assert [url for url in page.requests if not url.startswith((site[1], "data:", "blob:"))] == []
    tab.close()


def bits_of(model, content: bytes) -> list[float]:
    """Surprise of every byte after the first."""
    ids = torch.tensor([list(content)])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1].double()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return (nats / math.log(2)).tolist()


def check_bits(model, content: bytes, found: list[float]) -> None:
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx(bits_of(model, content), abs=1e-3)


def test_bits_of_every_byte_are_the_models(page, model):
    page.write(TEXT)
    content, bits, generated = page.record()
    assert content == TEXT.encode()
    check_bits(model, content, bits)
    assert max(bits[1:]) > 10 and min(bits[1:]) < 9 and not any(generated)
    mean = sum(bits[1:]) / len(bits[1:])
    playwright.expect(page.tab.locator("#bits")).to_have_text(f"{mean:.3f}")
    # Characters of several bytes, also of several code points, are whole.
    shown = [text for text, _ in page.characters()]
    assert "".join(shown) == TEXT and {"ï", "日", "👩‍👩‍👧", "e\u0301", "\t"} <= set(shown)


@pytest.mark.long
def test_edits_anywhere_give_the_bits_of_the_whole_text(page, model):
    drawn = random.Random(0)
    text = TEXT * 6
    for _ in range(8):
        begin = drawn.randrange(len(text))
        text = text[:begin] + drawn.choice(["", "x", "é", "lambda: 0"]) + text[begin + drawn.randrange(3) :]
        page.tab.get_by_label("Write or paste text").fill(text)  # the next edit may interrupt this one
    page.rest()
    content, bits, _ = page.record()
    assert content == text.encode()
    check_bits(model, content, bits)


@pytest.mark.long
def test_greedy_bytes_are_those_of_generate(page, model):
    page.write("import os")
    page.generate(60)
    content, bits, generated = page.record()
    ids = torch.tensor([list(b"import os")])
    expected = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=0)[0]
    assert content == bytes(expected.tolist())
    assert generated == [0] * 9 + [1] * (len(content) - 9)
    check_bits(model, content, bits)


@pytest.mark.long
def test_a_seed_repeats_its_text(page):
    texts = []
    for seed in (5, 5, 6):
        page.tab.get_by_role("button", name="Reset").click()
        page.write("class A")
        page.generate(40, temperature=0.9, seed=seed)
        texts.append(page.record()[0])
    assert texts[0] == texts[1] != texts[2]
    page.generate(10, temperature=-1)
    assert page.status("error") == "Temperature must be a number from 0 to 10."


@pytest.mark.long
def test_a_saved_state_continues_the_text(page, model, site, tmp_path):
    from hf_recurrent.export.exported_step import ExportedStep

    page.write(TEXT)
    path = page.save(tmp_path / "state.safetensors")
    assert path.stat().st_size < 4000
    state = ExportedStep(site[0] / "model").load_state(path)  # the same file serves other runtimes
    ids = torch.tensor([list(TEXT.encode())])
    with torch.inference_mode():
        expected = model(input_ids=ids[:, :-1], use_cache=True).state
    for name, part in expected.items():
        torch.testing.assert_close(state[name], part, atol=1e-3, rtol=1e-3)
    page.generate(30)
    whole = page.record()[0]
    page.tab.get_by_role("button", name="Reset").click()
    page.load(path.read_bytes(), "mine.safetensors")
    playwright.expect(page.tab.get_by_text("Continues from mine.safetensors.")).to_be_visible()
    assert page.record()[0] == b""
    page.generate(30)
    assert TEXT.encode() + page.record()[0] == whole


def hostile_files(path: Path) -> dict[str, bytes]:
    """Damaged copies of a state file, by a part of the sentence that refuses each."""
    good, tensors = path.read_bytes(), load_file(path)
    length = struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8 : 8 + length])
    metadata = header.pop("__metadata__")
    name = next(iter(tensors))

    def changed(**fields) -> bytes:
        text = json.dumps({"__metadata__": metadata, **header, name: {**header[name], **fields}}).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length :]

    def saved(tensors, **fields) -> bytes:
        save_file(tensors, path.with_name("other"), metadata | fields)
        return path.with_name("other").read_bytes()

    return {
        "shorter than 8 bytes": b"",
        "header does not fit": b"\xff" * 400,
        "header is not JSON": struct.pack("<Q", 4) + b"\x80[{}",
        "header is not an object": struct.pack("<Q", 4) + b"null",
        "names no weights": struct.pack("<Q", 2) + b"{}",
        "saved with other weights": saved(tensors, weights_hash="0" * 64),
        "lie outside the file": good[:-1],
        "NaN or infinite": saved(tensors | {name: tensors[name] * float("nan")}),
        "not of type F32": saved(tensors | {name: tensors[name].half()}),
        "and shape": saved(tensors | {name: tensors[name][:, :-1].contiguous()}),
        "has no part": saved({part: tensor for part, tensor in tensors.items() if part != name}),
        "unknown part": saved(tensors | {"toString": torch.zeros(1)}),
        "values of": changed(data_offsets=[-160, 0]),
        "pending byte is not a byte": saved(tensors, pending="[256]"),
        "pending byte is not JSON": saved(tensors, pending="["),
    }


@pytest.mark.long
def test_hostile_state_files_are_refused_with_one_sentence(page, tmp_path):
    page.write("abc")
    files = hostile_files(page.save(tmp_path / "state.safetensors"))
    for part, content in files.items():
        page.load(content)
        playwright.expect(page.tab.locator("#status")).to_contain_text(part)
        sentence = page.status("error")
        assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 200
    assert page.record()[0] == b"abc"  # the text is as it was
    page.generate(3)
    assert len(page.record()[0]) == 6


@pytest.mark.long
def test_bytes_that_are_not_utf8_are_read_and_shown_as_numbers(page, model):
    content = b"\xff caf\xc3\xa9 \xed\xa0\x80\x07\r\n\xe2\x82"
    page.tab.locator("#file-input").set_input_files({"name": "x", "mimeType": "text/plain", "buffer": content})
    playwright.expect(page.tab.locator("#length")).to_have_text(str(len(content)))
    page.rest()
    found, bits, _ = page.record()
    assert found == content
    check_bits(model, content, bits)
    shown = [text for text, _ in page.characters()]
    assert shown == ["FF", " ", "c", "a", "f", "é", " ", "ED", "A0", "80", "07", "\r\n", "E2", "82"]
    assert ["open" in classes for _, classes in page.characters()][-3:] == [False, True, True]
    page.tab.locator("#file-input").set_input_files({"name": "y", "mimeType": "text/plain", "buffer": b"\xac"})
    playwright.expect(page.tab.locator("#length")).to_have_text(str(len(content) + 1))
    page.rest()
    assert page.characters()[-1][0] == "€"


@pytest.mark.long
def test_a_long_paste_leaves_the_page_responsive_and_stops(page):
    page.tab.evaluate(
        """(text) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", text);
          const paste = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
          document.getElementById("draft").dispatchEvent(paste);
        }""",
        TEXT * 2000,
    )
    slowest = page.tab.evaluate(
        """async () => {
          let last = performance.now(), slowest = 0;
          while (document.getElementById("length").textContent.replace(",", "") < 600) {
            await new Promise((resolve) => setTimeout(resolve, 5));
            slowest = Math.max(slowest, performance.now() - last);
            last = performance.now();
          }
          return slowest;
        }"""
    )
    assert slowest < 2000  # milliseconds, on any machine; reading all of it takes much longer
    page.tab.get_by_role("button", name="Stop").click()
    page.rest()
    assert 600 <= len(page.record()[0]) < 2000 * len(TEXT.encode())


@pytest.mark.long
def test_long_texts_are_whole_in_and_out_of_sight(page):
    shown = page.tab.evaluate(
        """async () => {
          const { record } = await import("./app.js");
          const { TextView } = await import("./text_view.js");
          const element = document.createElement("div");
          element.style = "height: 200px; overflow: auto; white-space: pre-wrap";
          document.body.append(element);
          const view = new TextView(element, record, () => {});
          const bytes = new TextEncoder().encode("é日本x".repeat(20000) + "line\\n".repeat(4000));
          for (let start = 0; start < bytes.length; start += 997) {
            const part = bytes.slice(start, start + 997);
            record.append(start, part, new Float32Array(part.length), false);
            view.update(start);
          }
          await new Promise((resolve) => setTimeout(resolve, 300));
          const same = element.textContent === new TextDecoder().decode(bytes);
          return [same, element.querySelectorAll("span").length, element.children.length];
        }"""
    )
    same, spans, blocks = shown
    assert same and blocks > 40 and spans < 30_000  # of 104,000 characters


def test_the_keyboard_reads_bytes(page):
    page.write("aé")
    page.tab.get_by_role("region", name="Text", exact=True).last.focus()
    page.tab.keyboard.press("Home")
    spoken = page.tab.locator("#spoken")
    playwright.expect(spoken).to_have_text("a: byte 1: 0x61, not predicted")
    page.tab.keyboard.press("ArrowRight")
    bits = page.record()[1]
    playwright.expect(spoken).to_contain_text(f"é: byte 2: 0xC3, {bits[1]:.2f} bits")
    playwright.expect(spoken).to_contain_text(f"byte 3: 0xA9, {bits[2]:.2f} bits")
    page.tab.locator("#text span").first.hover()
    playwright.expect(page.tab.locator("#tip")).to_have_text("byte 1: 0x61, not predicted")


def test_a_key_before_the_text_is_drawn(page):
    page.tab.evaluate(
        "() => { window.draw = requestAnimationFrame; window.requestAnimationFrame = (f) => { last = f; }; }"
    )
    page.tab.get_by_label("Write or paste text").fill("ab")
    playwright.expect(page.tab.get_by_role("button", name="Stop")).to_be_disabled()
    page.tab.get_by_role("region", name="Text", exact=True).last.focus()
    page.tab.keyboard.press("Home")
    page.tab.evaluate("() => { window.requestAnimationFrame = draw; draw(last); }")
    page.draw()
    page.tab.keyboard.press("End")
    playwright.expect(page.tab.locator("#spoken")).to_contain_text("b: byte 2: 0x62")


def test_characters_are_those_of_utf8(page):
    drawn = random.Random(1)
    pieces = [
        *(text.encode() for text in ("a", "é", "日", "👍🏽")),
        *(b"\xc0", b"\xff", b"\xed\xa0\x80", b"\xf4\x90", b"\x80", b"\xe2\x82"),
    ]
    texts = [b"".join(drawn.choices(pieces, k=12)) for _ in range(100)]
    found = page.tab.evaluate(
        """async (texts) => {
          const { splitCharacters } = await import("./characters.js");
          return texts.map((bytes) => splitCharacters(Uint8Array.from(bytes), 0, bytes.length)
            .map(({ start, end, text }) => [start, end, text]));
        }""",
        [list(text) for text in texts],
    )
    for text, characters in zip(texts, found, strict=True):
        assert [begin for begin, _, _ in characters] == [0, *(end for _, end, _ in characters[:-1])]
        shown = "".join(chr(0xDC00 + text[begin]) if part is None else part for begin, _, part in characters)
        assert shown == text.decode("utf-8", "surrogateescape")


def damage(site: Path, name: str, change):
    """A handler of requests for a file of the model that answers with a changed one."""
    content = (site / "model" / name).read_bytes()
    return f"**/model/{name}", lambda route: route.fulfill(body=change(content))


@pytest.mark.long
@pytest.mark.parametrize(
    "name, change, part",
    [
        ("step.onnx", lambda content: content[:-1] + bytes([content[-1] ^ 1]), "step.onnx is damaged: it differs"),
        ("step.onnx", lambda content: content[:-1], "step.onnx is damaged: it has"),
        ("specification.json", lambda content: content.replace(b"onnx", b"aoti"), "specification.json is damaged"),
        ("manifest.json", lambda content: content[:-9], "manifest.json is damaged: it is not JSON"),
        ("manifest.json", lambda content: content.replace(b"step.onnx", b"step.onny"), "does not list step.onnx"),
    ],
)
def test_a_damaged_model_is_refused_with_one_sentence(browser, site, name, change, part):
    tab = browser.new_page()
    tab.route(*damage(site[0], name, change))
    page = Page(tab, site[1])
    sentence = page.status("error")
    assert part in sentence and sentence.endswith(".")
    assert tab.get_by_role("button", name="Continue").is_disabled()
    tab.close()


def test_a_missing_model_or_runtime_says_how_to_get_it(browser, site):
    for pattern in ("**/model/manifest.json", "**/onnxruntime/*.mjs"):
        tab = browser.new_page()
        tab.route(pattern, lambda route: route.fulfill(status=404))
        assert "python prepare.py CHECKPOINT" in Page(tab, site[1]).status("error")
        tab.close()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_readable_and_the_page_fits(browser, site, scheme, tmp_path):
    tab = browser.new_page(color_scheme=scheme, viewport={"width": 1000, "height": 1150})
    page = Page(tab, site[1])
    playwright.expect(tab.get_by_role("button", name="Continue")).to_be_enabled(timeout=20_000)
    page.write(TEXT)
    page.generate(100, temperature=1)
    lights = tab.evaluate(
        """() => {
          const light = (text) => {
            const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((value) => {
              const part = value / 255;
              return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const card = getComputedStyle(document.querySelector("section")).backgroundColor;
          return Array.from(document.querySelectorAll("#legend li"), (item) => {
            const { color, backgroundColor } = getComputedStyle(item);
            return [light(color), light(/, 0\\)$/.test(backgroundColor) ? card : backgroundColor)];
          });
        }"""
    )
    contrasts = [(max(pair) + 0.05) / (min(pair) + 0.05) for pair in lights]
    assert len(contrasts) == 9 and min(contrasts) >= 4.5  # as WCAG asks
    backgrounds = [background for _, background in lights]
    assert backgrounds == sorted(backgrounds, reverse=scheme == "light")  # a ramp that reads without colours
    assert tab.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    tab.set_viewport_size({"width": 360, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.close()
