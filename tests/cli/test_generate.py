"""`hf-recurrent generate`: prompts, files and states, saved and continued."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli.generate import main
from hf_recurrent.generation.text_state import load_text_state

GREEDY = {"do_sample": False}
SIZES = {"hidden_size": 32, "state_size": 48, "num_hidden_layers": 2}
BOOK = "".join(f"{number}: the quick brown fox jumps over the lazy dog.\n" for number in range(200))


def build(family: str, seed: int = 0, **overrides):
    torch.manual_seed(seed)
    # With a tied embedding, an untrained model says the last byte again and again.
    options = SIZES | {"tie_word_embeddings": False} | overrides
    return AutoModelForCausalLM.from_config(config_from_preset(f"{family}-tiny", **options)).eval()


@pytest.fixture(scope="module")
def ascii_checkpoint(tmp_path_factory):
    """A model trained on printable text, so that its output is printed unchanged."""
    model = build("memora").train()
    data = torch.frombuffer(bytearray(BOOK.encode()), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        start = step * 131 % (len(data) - 4 * 65)
        block = data[start : start + 4 * 65].view(4, 65)
        optimizer.zero_grad()
        model(block[:, :-1], shift_labels=block[:, 1:]).loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return str(path)


def run(capsys, *arguments: str) -> str:
    main([*arguments, "--quiet", "--device", "cpu"])
    return capsys.readouterr().out


def test_command_reads_a_book_once_and_continues_many_times(ascii_checkpoint, tmp_path, capsys):
    book, state, later = tmp_path / "book.txt", str(tmp_path / "book.safetensors"), str(tmp_path / "later.safetensors")
    book.write_text(BOOK)
    read_only = ["--prompt_file", str(book), "--max_new_tokens", "0", "--save_state", state]
    assert run(capsys, ascii_checkpoint, *read_only) == ""
    assert (tmp_path / "book.safetensors").stat().st_size < 10_000
    whole = run(capsys, ascii_checkpoint, "--prompt_file", str(book), "--greedy", "--max_new_tokens", "50")
    assert len(whole) == 51 and whole.isascii()
    first = run(
        capsys, ascii_checkpoint, "--state", state, "--greedy", "--max_new_tokens", "20", "--save_state", later
    )
    second = run(capsys, ascii_checkpoint, "--state", later, "--greedy", "--max_new_tokens", "30")
    assert first[:-1] + second == whole
    prompted = run(capsys, ascii_checkpoint, "--state", state, "--prompt", "7", "the", "--greedy")
    alone = run(capsys, ascii_checkpoint, "--prompt_file", str(book), "--prompt", "the", "--greedy")
    assert prompted.startswith("=== '7'\n") and prompted.endswith(f"=== 'the'\n{alone}")


def test_command_samples_repeatably(ascii_checkpoint, capsys):
    options = ["--prompt", "1: the", "--temperature", "1.5", "--top_k", "50", "--top_p", "0.95"]
    texts = [run(capsys, ascii_checkpoint, *options, "--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_command_beams(ascii_checkpoint, capsys):
    assert len(run(capsys, ascii_checkpoint, "--prompt", "1: the", "--num_beams", "3", "--max_new_tokens", "8")) > 1


def test_command_streams_each_character_as_it_comes(ascii_checkpoint, capsys, monkeypatch):
    from transformers import TextStreamer

    pieces = []
    original = TextStreamer.on_finalized_text
    monkeypatch.setattr(
        TextStreamer,
        "on_finalized_text",
        lambda self, text, stream_end=False: (pieces.append(text), original(self, text, stream_end))[1],
    )
    run(capsys, ascii_checkpoint, "--prompt", "1: the", "--greedy", "--max_new_tokens", "10")
    assert len([piece for piece in pieces if piece]) == 10


def test_command_with_a_stock_model(tmp_path, capsys):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    both = run(capsys, str(tmp_path), "--prompt", "hello", "a", "--greedy", "--max_new_tokens", "5")
    alone = run(capsys, str(tmp_path), "--prompt", "a", "--greedy", "--max_new_tokens", "5")
    assert both.endswith(f"=== 'a'\n{alone}")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--prompt", "a", "--save_state", str(tmp_path / "state.safetensors")])
    assert "`--save_state` needs a recurrent model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to continue"),
        (["--prompt", ""], "A text is empty"),
        (["--prompt", "a", "--temperature", "0"], "`--temperature` is 0.0"),
        (["--prompt", "a", "--top_p", "1.5"], "`--top_p` is 1.5"),
        (["--prompt", "a", "--max_new_tokens", "-1"], "`--max_new_tokens` is -1; it must be at least 0."),
        (["--prompt_file", "missing.txt"], "`--prompt_file` is 'missing.txt'; file not found."),
        (["--state", "missing.safetensors"], "`--state` is 'missing.safetensors'; file not found."),
        (
            ["--prompt", "a", "--save_state", "missing/state"],
            "`--save_state` is 'missing/state'; directory 'missing' not found.",
        ),
    ],
)
def test_command_names_bad_input(ascii_checkpoint, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main([ascii_checkpoint, *arguments])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_command_names_a_missing_model_and_a_foreign_state(ascii_checkpoint, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--prompt", "a"])
    assert "no `config.json`" in capsys.readouterr().err
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(SystemExit):
        main([ascii_checkpoint, "--state", str(tmp_path / "foreign.safetensors")])
    assert "is not a saved state; it must be written by `save_state` or `--save_state`" in capsys.readouterr().err


def test_a_draft_changes_nothing_but_the_time(ascii_checkpoint, capsys, tmp_path):
    common = [ascii_checkpoint, "--prompt", "17: the", "--greedy", "--max_new_tokens", "40"]
    main([*common, "--save_state", str(tmp_path / "plain")])
    expected = capsys.readouterr().out
    main([*common, "--draft", ascii_checkpoint, "--save_state", str(tmp_path / "draft")])
    shown = capsys.readouterr()
    assert shown.out == expected and "proposed bytes accepted" in shown.err
    model = AutoModelForCausalLM.from_pretrained(ascii_checkpoint)
    plain, drafted = (load_text_state(model, tmp_path / name) for name in ("plain", "draft"))
    assert drafted.pending == plain.pending
    assert all(torch.allclose(drafted.state[name], plain.state[name], atol=1e-5) for name in plain.state)


def test_several_continuations_of_one_text(ascii_checkpoint, capsys):
    common = [ascii_checkpoint, "--prompt", "17:", "--seed", "3", "--max_new_tokens", "12"]
    main([*common, "--num_continuations", "3"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("=== ")] == [
        "=== text 0",
        "=== text 1",
        "=== text 2",
    ]


@pytest.mark.parametrize("draft", [True, False])
def test_constraints(ascii_checkpoint, capsys, tmp_path, draft):
    pytest.importorskip("xgrammar")
    common = [ascii_checkpoint, "--prompt", "17:", "--seed", "3", *(["--draft", ascii_checkpoint] if draft else [])]
    main([*common, "--regex", "[0-9]{4} (cats|dogs)"])
    assert re.fullmatch("[0-9]{4} (cats|dogs)\n", capsys.readouterr().out)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}')
    main([*common, "--json_schema", str(schema)])
    assert {type(value) for value in json.loads(capsys.readouterr().out)} == {bool}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--regex", "a", "--json_schema", "x"], "`--regex` cannot be combined with `--json_schema`"),
        (["--draft", "d", "--state", "s"], "`--draft` cannot be combined with `--state`"),
        (["--draft", "d", "--num_beams", "2"], "`--num_beams` has 2; with `--draft`, it must be 1"),
        (["--draft", "d", "--prompt", "a", "b"], "`--prompt` has 2; with `--draft`, it must be 1"),
        (["--num_continuations", "0"], "`--num_continuations` is 0"),
        (["--num_continuations", "2", "--prompt", "a", "b"], "`--num_continuations` is for one text; there are 2"),
    ],
)
def test_flags_that_do_not_go_together(ascii_checkpoint, flags, message, capsys):
    with pytest.raises(SystemExit):
        main([ascii_checkpoint, "--prompt", "a", *flags])
    assert message in capsys.readouterr().err
