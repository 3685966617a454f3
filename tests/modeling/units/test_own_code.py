"""A user's own recurrent unit: allowed files, what a checkpoint holds, and whose code runs at loading."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from model_cases import leaky_unit, tiny_config, tiny_model
from own_parts_state import forget_unit, restored_parts
from transformers import AutoModel, AutoModelForCausalLM

from hf_recurrent import MemoraForCausalLM, RecurrentUnit, register_recurrent_unit
from hf_recurrent.checkpoints.weights import load_weights
from hf_recurrent.modeling.units import own_code
from hf_recurrent.modeling.units.own_code import with_relative_imports
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS

UNIT = Path(leaky_unit.__file__).read_text()
IDS = torch.arange(1, 13)[None]


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    """Files of `tmp_path` can be imported; afterwards, units and modules are as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with restored_parts(tmp_path):
        yield


def write(name: str, text: str) -> None:
    Path(name).write_text(text)
    importlib.invalidate_caches()


# ---- Files ----


def test_imports_of_the_package_become_relative():
    text = (
        "import torch\n"
        "from hf_recurrent import (\n    RecurrentUnit as Base,\n    register_recurrent_unit,\n)\n"
        "from hf_recurrent.modeling.block.recurrent_state import upcast  # é\n"
        "\n\ndef late():\n    from hf_recurrent import DenseUnit, RecurrentUnit; return DenseUnit\n"
    )
    assert with_relative_imports(text, "unit.py") == (
        "import torch\n"
        "from .recurrent_shared import RecurrentUnit as Base, register_recurrent_unit\n"
        "from .recurrent_shared import upcast  # é\n"
        "\n\ndef late():\n    from .recurrent_shared import DenseUnit, RecurrentUnit; return DenseUnit\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import math, os.path\nimport numpy as np\nfrom torch import nn\nfrom transformers import initialization\n",
        "from __future__ import annotations\nimport safetensors.torch\n",
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
        '"""from hf_recurrent import Task"""\n',
    ],
)
def test_files_that_need_no_change(text):
    assert with_relative_imports(text, "unit.py") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\nimport einops\n", "`unit.py`, line 2: `einops` is imported, but a file with a recurrent unit"),
        ("def f():\n    from einops import rearrange\n", "line 2: `einops` is imported"),
        ("import math, my_helpers\n", "`my_helpers` is imported"),
        ("import hf_recurrent as hf\n", "write `from hf_recurrent import NAME` in place of `import hf_recurrent`"),
        ("import hf_recurrent.modeling.units.recurrent_unit\n", "write `from hf_recurrent import NAME`"),
        (
            "from hf_recurrent import RecurrentUnit, Task\n",
            "`Task` of `hf_recurrent` is imported, but .*; move the unit",
        ),
        ("from hf_recurrent import Absent\n", "`Absent` of `hf_recurrent` is imported"),
        ("from hf_recurrent import *\n", r"`\*` of `hf_recurrent` is imported"),
        ("from hf_recurrent.data.corpus import Corpus\n", "`Corpus` of `hf_recurrent.data.corpus` is imported"),
        ("from hf_recurrent.modeling import recurrent_unit\n", "`recurrent_unit` of `hf_recurrent.modeling` is"),
        ("from hf_recurrent.modeling.absent import x\n", "`x` of `hf_recurrent.modeling.absent` is imported"),
        ("from . import helpers\n", "line 1: relative imports are not possible"),
        ("from .recurrent_unit import RecurrentUnit\n", "line 1: relative imports are not possible"),
        (
            "x = 1; from hf_recurrent import RecurrentUnit\n",
            "line 1: the import of `hf_recurrent` must begin its line",
        ),
    ],
)
def test_files_that_would_not_load_elsewhere(text, message):
    with pytest.raises(ValueError, match=message):
        with_relative_imports(text, "unit.py")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("einops_unit", UNIT.replace("import torch\n", "import torch, einops\n", 1), "`einops_unit.py`, line"),
        ("modeling_memora", UNIT.replace('"leaky"', '"other"'), "also the name of a file of this package"),
        ("two_classes", UNIT.replace('"leaky"', '"glru"'), "'glru' is a recurrent unit of this package"),
        ("a_word", UNIT.replace('"leaky"', '"my unit"'), "is registered as 'my unit'; the name must be an identifier"),
        ("a_base", UNIT.replace("(RecurrentUnit)", "(torch.nn.Module)"), "must be a subclass of `RecurrentUnit`"),
        (
            "other_code",
            UNIT.replace("1 - decay", "2 - decay"),
            "'leaky' is registered already, with other code, from `le",
        ),
    ],
)
def test_registration_refuses(name, text, message):
    write("einops.py", "")
    write(f"{name}.py", text)
    units = dict(RECURRENT_UNITS)
    with pytest.raises(ValueError, match=message):
        importlib.import_module(name)
    assert dict(RECURRENT_UNITS) == units


def test_a_local_class_of_a_file_is_refused():
    write(
        "local_unit.py",
        "from hf_recurrent import RecurrentUnit\n\ndef f():\n    class U(RecurrentUnit): pass\n    return U\n",
    )
    with pytest.raises(ValueError, match=r"`f.<locals>.U` must be defined at the top level of `local_unit.py`"):
        register_recurrent_unit("local")(importlib.import_module("local_unit").f())


def test_the_same_code_may_be_registered_again():
    write("copied_unit.py", UNIT)
    again = importlib.import_module("copied_unit").LeakyIntegrator
    assert again is not leaky_unit.LeakyIntegrator and RECURRENT_UNITS["leaky"] is again
    assert importlib.reload(sys.modules["copied_unit"]).LeakyIntegrator is RECURRENT_UNITS["leaky"]


def test_units_are_added_by_registration_only():
    with pytest.raises(TypeError):
        RECURRENT_UNITS["mine"] = RecurrentUnit


def test_unknown_units_suggest_the_nearest_and_the_flag():
    with pytest.raises(
        ValueError, match=r"`recurrent_unit` is 'leakey'.*leaky.*Did you mean 'leaky'\?.*--import FILE"
    ):
        MemoraForCausalLM(tiny_config("memora", recurrent_unit="leakey"))


# ---- Checkpoints ----


@pytest.fixture
def saved():
    model = tiny_model("memora+leaky")
    model.save_pretrained("saved")
    return model


WITHOUT_PACKAGE = """
import sys
for name in ('hf_recurrent', 'modeling', 'leaky_unit'):
    sys.modules[name] = None
"""


def test_a_checkpoint_loads_without_package_and_file(saved, bare_python):
    torch.save({"logits": saved(IDS).logits, "new": generated(saved)}, "expected.pt")
    code = """
import torch
from transformers import AutoModelForCausalLM
expected = torch.load("expected.pt", weights_only=True)
ids = torch.arange(1, 13)[None]
model = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
for step in range(2):
    assert torch.equal(model(ids).logits, expected["logits"])
    new = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(new, expected["new"])
    model.train()(ids, labels=ids).loss.backward()
    rate = model.model.layers[0].recurrent_block.recurrent_unit.rate
    assert rate.grad.abs().sum() > 0
    assert any(name.endswith(".rate") for name in model.parameters_without_weight_decay())
    model.save_pretrained("again")
    model = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
"""
    done = bare_python.python(["-c", WITHOUT_PACKAGE + code], ".")
    assert done.returncode == 0, done.stderr
    for name in ("leaky_unit.py", "modeling_memora.py", "recurrent_shared.py"):
        assert Path("again", name).read_text() == Path("saved", name).read_text()


def generated(model):
    return model.generate(IDS, max_new_tokens=5, do_sample=False, eos_token_id=None)


def test_the_registered_class_is_used_where_the_package_is(saved):
    loaded = AutoModelForCausalLM.from_pretrained("saved").eval()
    assert type(loaded.model.layers[0].recurrent_block.recurrent_unit) is RECURRENT_UNITS["leaky"]
    assert torch.equal(loaded(IDS).logits, saved(IDS).logits)


def test_code_runs_only_if_it_is_trusted(saved):
    forget_unit()
    file = Path("saved/leaky_unit.py")
    file.write_text(f"open({str(Path('executed').absolute())!r}, 'w').close()\n{file.read_text()}")
    message = (
        "`recurrent_unit` is 'leaky', whose code is the file `leaky_unit.py` of the checkpoint; it is run only with"
    )
    for auto_class in (AutoModelForCausalLM, AutoModel, MemoraForCausalLM):
        with pytest.raises(ValueError, match=message):
            auto_class.from_pretrained("saved")
        assert not Path("executed").exists()
    loaded = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True).eval()
    assert Path("executed").exists()
    assert isinstance(loaded, MemoraForCausalLM), "the package's own classes take the place of the checkpoint's"
    unit = loaded.model.layers[0].recurrent_block.recurrent_unit
    assert isinstance(unit, RecurrentUnit) and type(unit) is not leaky_unit.LeakyIntegrator
    assert torch.equal(loaded(IDS).logits, saved(IDS).logits)
    loaded.save_pretrained("again")
    assert Path("again/leaky_unit.py").read_text() == file.read_text()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("../leaky_unit.LeakyIntegrator", "must be of the form FILE.CLASS"),
        ("/tmp/x.LeakyIntegrator", "must be of the form FILE.CLASS"),
        (["leaky_unit.LeakyIntegrator", "x.Y"], "must be of the form FILE.CLASS"),
        ("recurrent_shared.RecurrentState", "`recurrent_shared.py` of the checkpoint does not register"),
    ],
)
def test_damaged_references(saved, reference, message):
    forget_unit()
    content = json.loads(Path("saved/config.json").read_text())
    content["auto_map"]["recurrent_unit"] = reference
    Path("saved/config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        MemoraForCausalLM.from_pretrained("saved", trust_remote_code=True)


def test_a_changed_file_is_named_when_a_model_is_loaded(saved, monkeypatch):
    warnings = []
    monkeypatch.setattr(own_code.logger, "warning", warnings.append)
    AutoModelForCausalLM.from_pretrained("saved")
    load_weights(saved, "saved")  # as a resumed run does
    assert not warnings
    file = Path("saved/leaky_unit.py")
    file.write_text(file.read_text().replace("1 - decay", "2 - decay"))
    AutoModelForCausalLM.from_pretrained("saved")
    load_weights(saved, "saved")
    assert len(warnings) == 2
    assert all("`leaky_unit.py` of 'saved' differs from the imported `leaky_unit.py`" in text for text in warnings)


def test_the_code_that_was_imported_is_saved_not_an_edited_file():
    write("copied_unit.py", UNIT)
    importlib.import_module("copied_unit")
    write("copied_unit.py", "raise AssertionError")
    tiny_model("memora+leaky").save_pretrained("saved")
    assert Path("saved/copied_unit.py").read_text() == own_code.OWN_CODE["leaky"].text


def test_another_unit_in_the_same_directory_leaves_no_reference(saved):
    tiny_model("memora+mingru").save_pretrained("saved")
    assert "recurrent_unit" not in json.loads(Path("saved/config.json").read_text())["auto_map"]
    assert "leaky" not in Path("saved/modeling_memora.py").read_text()


def test_a_unit_of_main_is_used_and_not_saved(bare_python):
    text = UNIT.replace('"leaky"', '"mine"') + (
        "\n\nfrom transformers import AutoModelForCausalLM\nfrom hf_recurrent import config_from_preset\n"
        "sizes = {'hidden_size': 8, 'state_size': 8, 'num_hidden_layers': 1}\n"
        "model = AutoModelForCausalLM.from_config(config_from_preset('hawk-tiny', recurrent_unit='mine', **sizes))\n"
        "model.save_pretrained('saved')\n"
        "AutoModelForCausalLM.from_pretrained('saved')\n"
        "from hf_recurrent import ByteTokenizer\n"
        "from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub\n"
        "save_checkpoint_for_hub(model, ByteTokenizer(), 'for_hub')\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    write("program.py", text)
    done = bare_python.python(["program.py"], ".", environment={"PYTHONPATH": root})
    assert "'mine' is not defined in a file: its code is not saved" in done.stderr
    assert not list(Path("saved").glob("program.py")) and Path("saved/model.safetensors").is_file()
    assert done.returncode == 1 and "has the recurrent unit 'mine', whose code is not in a file" in done.stderr
