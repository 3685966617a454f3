"""The examples of examples/on_device: scripts with tables and pictures, and the programs for boards, compiled."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cortex_m import CORTEX

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "on_device"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
COMPILER, CPLUSPLUS = shutil.which("cc"), shutil.which("arm-none-eabi-g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a C compiler is not installed")


@pytest.fixture
def script(monkeypatch):
    """A function that loads a script by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        specification = importlib.util.spec_from_file_location(f"on_device_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    yield load
    for name in ("compiled_learner", "count_model"):
        sys.modules.pop(name, None)


def test_counts_are_a_distribution_that_learns(script):
    model = script("count_model").CountModel(100_000)
    losses = []
    for byte in b"abcab" * 200:
        assert model.probabilities.sum() == pytest.approx(1) and model.probabilities.min() > 0
        losses.append(model.learn(byte))
    assert losses[0] == pytest.approx(np.log(256)) and np.mean(losses[-50:]) < 0.3
    small = script("count_model").CountModel(6 * 40)
    for byte in np.random.default_rng(0).integers(97, 107, 500):
        small.learn(int(byte))
        assert sum(np.count_nonzero(row) for row in small._counts.values()) == small._used <= 40


def test_generated_data_are_what_their_comments_say(script):
    log, sensor = script("learn_log"), script("sensor_anomaly")
    text = log.generated_log(5000)
    assert len(text) == 5000 and text == log.generated_log(5000) and b" gateway " in text
    series = sensor.lorenz(6000)
    assert np.ptp(series) > 20 and np.isfinite(series).all()
    lossy, after = sensor.with_losses(series)
    assert len(lossy) == len(after) == 6000 - sensor.LOST * sensor.FAULTS and after.sum() == sensor.FAULTS
    scores, faulty = np.array([0.1, 0.9, 0.3, 0.8]), np.array([False, True, False, True])
    assert sensor.area_under_curve(scores, faulty) == 1 and sensor.area_under_curve(-scores, faulty) == 0


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("learn_log", ["--bytes", "20000"], "order-2 counts, 249 kB"),
        ("next_key", ["--keys", "4000"], "order-3 counts, 249 kB"),
        ("sensor_anomaly", ["--length", "3000"], "area under the ROC curve"),
    ],
)
def test_a_script_prints_a_table_and_draws(script, name, arguments, expected, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "picture.png"
    script(name).main([*arguments, "--picture", str(picture)])
    table = capsys.readouterr().out
    assert expected in table and "nan" not in table
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size < 100_000


ARDUINO = """#pragma once
#include <stddef.h>
struct Port {
    void begin(long);
    explicit operator bool() const;
    int available();
    int read();
    void print(const char *);
    void print(unsigned long);
    void println(const char *);
    void println(unsigned long);
    void println(double, int = 2);
};
extern Port Serial;
void setup();
void loop();
"""


@needs_compiler
@pytest.mark.skipif(CPLUSPLUS is None, reason="arm-none-eabi-g++ is not installed")
@pytest.mark.long
def test_the_sketch_compiles_for_cortex_m(script, tmp_path):
    script("prepare").main(["arduino", "--output_dir", str(tmp_path)])
    sketch = (FOLDER / "arduino/on_device_learner/on_device_learner.ino").read_text()
    (tmp_path / "Arduino.h").write_text(ARDUINO)
    (tmp_path / "sketch.cpp").write_text(f'#include "Arduino.h"\n{sketch}')
    for part in CORTEX.values():
        for command in ([CPLUSPLUS, "-std=gnu++17", "-c", "sketch.cpp"], ["arm-none-eabi-gcc", "-c", "model.c"]):
            subprocess.run([*command, *part, *STRICT, "-Os"], cwd=tmp_path, check=True)


ESP_IDF = {
    "esp_log.h": "#include <stdio.h>\n"
    '#define ESP_LOGI(tag, form, ...) printf("%s: " form "\\n", tag, __VA_ARGS__)\n'
    '#define ESP_LOGE(tag, text) printf("%s: %s\\n", tag, text)\n',
    "freertos/FreeRTOS.h": "",
    "freertos/task.h": "#include <stdlib.h>\n#define vTaskDelay(ticks) exit(0)\n",
    "start.c": "void app_main(void);\nint main(void) { app_main(); return 0; }\n",
}


@needs_compiler
@pytest.mark.long
def test_the_program_of_esp_idf_learns_with_stand_ins_for_its_headers(script, tmp_path):
    script("prepare").main(["esp-idf", "--output_dir", str(tmp_path)])
    for name, text in ESP_IDF.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(FOLDER / "esp-idf/main/main.c", tmp_path)
    command = [COMPILER, "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O2", "-I.", "start.c", "main.c", "model.c"]
    subprocess.run([*command, "-o", "main", "-lm"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "main"], input=b"abracadabra " * 200, capture_output=True, check=True)
    found = [float(line.split()[3]) for line in done.stdout.decode().splitlines()[1:]]
    assert len(found) == 2400 // 256 and found[-1] < 1 < found[0]
