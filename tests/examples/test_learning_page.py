"""The page of examples/on_device/browser: its learner in Node beside the one in Python, and the page in Chromium."""

import functools
import http.server
import importlib.util
import json
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from chromium import chromium, needs_chromium

PAGE = Path(__file__).resolve().parents[2] / "examples" / "on_device" / "browser"
NODE = shutil.which("node")
TEXT = b"abracadabra, abracadabra; " * 40


def load_prepare():
    specification = importlib.util.spec_from_file_location("prepare_learner", PAGE / "prepare.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A copy of the page with its learner."""
    prepare, folder = load_prepare(), tmp_path_factory.mktemp("site") / "page"
    if not prepare.compilers():
        pytest.skip("clang with wasi-libc, or ziglang, is not installed")
    shutil.copytree(PAGE, folder, ignore=shutil.ignore_patterns("learner.w*", "__pycache__"))
    try:
        prepare.main(["--output_dir", str(folder)])
    except SystemExit:
        pytest.skip("the installed compilers have no library for WebAssembly")
    return folder


SCRIPT = """
import { readFile } from "node:fs/promises";
import { Learner } from "./learner.js";
const learner = await Learner.create(await readFile("learner.wasm"), await readFile("learner.weights"));
const text = new TextEncoder().encode(process.argv[2]);
const bits = Array.from(text.subarray(0, 500), (byte) => learner.learn(byte));
const saved = learner.save();
const rest = Array.from(text.subarray(500), (byte) => learner.learn(byte));
const suggestion = learner.suggestions(1)[0];
learner.begin();
const again = learner.learn(text[0]) + learner.learn(text[1]);
learner.load(saved);
const loaded = Array.from(text.subarray(500), (byte) => learner.learn(byte));
const refused = [];
for (const content of [saved.slice(1), saved.map((byte, k) => (k === 2000 ? byte ^ 1 : byte))]) {
  try { learner.load(content); } catch (error) { refused.push(error.message); }
}
console.log(JSON.stringify({ bits, rest, loaded, refused, suggestion, again, memory: learner.memoryBytes }));
"""


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_it_learns_in_node_as_in_python(site):
    (site / "check.mjs").write_text(SCRIPT)
    (site / "package.json").write_text('{"type": "module"}')
    done = subprocess.run([NODE, "check.mjs", TEXT.decode()], cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rest"] == found["loaded"]
    assert found["refused"] == ["The file is damaged or belongs to another learner."] * 2
    assert found["again"] == pytest.approx(sum(found["bits"][:2]))
    assert found["suggestion"] == TEXT[0] and np.mean(found["rest"]) < 1 < 3 < np.mean(found["bits"][1:100])
    assert found["memory"] < 200_000


@pytest.fixture(scope="module")
def address(site):
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@needs_chromium
def test_bits_per_byte_fall_in_the_tab(address, tmp_path):
    expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
    with chromium() as browser:
        tab = browser.new_page()
        faults, requests = [], []
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(address)
        status = tab.locator("#status")
        expect(status).to_have_attribute("data-kind", "ready", timeout=20_000)
        tab.get_by_label("Type here").press_sequentially("abra")
        expect(tab.locator("#bytes")).to_have_text("4")
        first = float(tab.locator("#bits").inner_text())
        file = {"name": "a.txt", "mimeType": "text/plain", "buffer": TEXT * 3}
        tab.locator("#file-input").set_input_files(file)
        expect(tab.locator("#bytes")).to_have_text(f"{4 + 3 * len(TEXT):,}", timeout=30_000)
        assert first > 4 > 1 > float(tab.locator("#recent").inner_text())
        assert tab.locator("#line").get_attribute("points").count(",") == 3
        expect(status).to_have_attribute("data-kind", "ready")
        with tab.expect_download() as download:
            tab.get_by_role("button", name="Save").click()
        saved = tmp_path / "learned.bin"
        download.value.save_as(saved)
        tab.get_by_role("button", name="Forget everything").click()
        expect(tab.locator("#bytes")).to_have_text("0")
        tab.locator("#load-input").set_input_files(saved)
        expect(status).to_have_attribute("data-kind", "ready")
        tab.locator("#load-input").set_input_files({**file, "name": "b.bin"})
        expect(status).to_have_attribute("data-kind", "error")
        tab.locator("#file-input").set_input_files({**file, "buffer": TEXT})
        expect(tab.locator("#bytes")).to_have_text(f"{len(TEXT):,}", timeout=30_000)
        assert float(tab.locator("#recent").inner_text()) < 0.5  # it goes on where it was saved
        assert faults == [] and all(url.startswith((address, "data:", "blob:")) for url in requests)


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    prepare = load_prepare()
    monkeypatch.setattr(prepare, "compilers", list)
    with pytest.raises(OSError, match="pip install ziglang"):
        prepare.compile_page(tmp_path, tmp_path / "learner.wasm")
