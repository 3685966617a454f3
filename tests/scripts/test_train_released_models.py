"""The released models: trained in pieces, written as repositories, and uploaded to a Hub on 127.0.0.1."""

import runpy
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_released_models.py"
sys.path.append(str(ROOT / "tests" / "hub"))
NAME = "lru-tiny-python"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "NAME is 'absent'; it must be one of memora-tiny-python"),
        (["--upload"], "--upload needs --release OWNER."),
        (["--release", "me", "--", "--train_bytes", "5"], "-- --train_bytes is for training"),
        ([NAME, "--release", "me", "--output_dir", "none"], f"none/{NAME}: directory not found"),
    ],
)
def test_words_that_do_not_fit_are_refused(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert message in capsys.readouterr().err + str(end.value.code)


def test_weights_over_the_limit_are_not_written(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    model = script["AutoModelForCausalLM"].from_pretrained(ROOT / "model_cards" / NAME)
    limited = script["write"].__globals__
    limited["MOST_BYTES"] = 100_000
    with pytest.raises(SystemExit, match=r"its weights take .* bytes; a released model has at most 100,000"):
        script["write"](model, script["ByteTokenizer"](), tmp_path / "large", "# A card")
    assert not (tmp_path / "large").exists()


def test_a_release_is_a_dry_run_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), NAME, "--release", "me", "--output_dir", str(ROOT / "model_cards")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    shown = capsys.readouterr().out
    assert f"Would upload to me/{NAME}:" in shown and "Nothing was uploaded; --upload does it." in shown
    assert f'from_pretrained("me/{NAME}"' in shown and "your-name" not in shown


@pytest.mark.long
def test_a_model_is_trained_in_pieces_and_released(tmp_path):
    from hub_process import TOKEN, run_words
    from loopback_hub import LoopbackHub

    (tmp_path / "book.txt").write_text("It was a dark night, and nobody came to the house.\n\n" * 200)
    short = ["--corpus", "book.txt", "--", "--train_bytes", "4e3", "--block_size", "16", "--logging_steps", "1"]
    with LoopbackHub(TOKEN) as hub:

        def run(*words: str) -> str:
            return run_words([str(SCRIPT), NAME, *words], hub, tmp_path, token="--upload" in words)

        assert f"{NAME}: stopped after 0 minutes" in run("--minutes", "0", *short)
        assert not (tmp_path / "runs" / "released").exists()
        assert f"{NAME}: written." in run(*short)
        assert "written before" in run(*short)
        assert f"Would upload to tester/{NAME}" in run("--release", "tester") and not hub.repositories
        run("--release", "tester", "--upload")
        files = hub.files(f"tester/{NAME}")
    folder = tmp_path / "runs" / "released" / NAME
    written = {path.name for path in folder.iterdir()}
    assert written <= files.keys() and {"training_curve.png", "provenance.json", "recurrent_shared.py"} <= files.keys()
    card = files["README.md"].content.decode()
    assert f'from_pretrained("tester/{NAME}"' in card and "your-name" not in card and "CPU time" in card
    (tmp_path / "uploaded.safetensors").write_bytes(files["model.safetensors"].content)
    with (
        safe_open(tmp_path / "uploaded.safetensors", "pt") as one,
        safe_open(folder / "model.safetensors", "pt") as two,
    ):
        types = [{name: file.get_slice(name).get_dtype() for name in file.keys()} for file in (one, two)]  # noqa: SIM118
    assert types[0] == types[1] and "BF16" in types[0].values()
