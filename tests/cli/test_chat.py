"""`hf-recurrent chat`: mistakes, and a terminal."""

import time

import pytest
import terminals
from chat_models import build

from hf_recurrent import CHAT_TEMPLATE
from hf_recurrent.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-2"], "`--temperature` is -2.0; it must be 0 or at least 1e-06."),
        (["--top-k", "-2"], "`--top-k` is -2; it must be at least 0."),
        (["--max_new_tokens", "0"], "`--max_new_tokens` is 0; it must be at least 1."),
        (["--state", "absent"], "`--state` is 'absent'; file not found."),
        (["--system", "Be brief."], "`--system` needs a chat template"),
    ],
)
def test_mistakes(words, message, tmp_path, capsys):
    model, tokenizer = build()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["chat", str(tmp_path), *words])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.skipif(terminals.pty is None, reason="pseudo-terminals are of Unix")
def test_in_a_terminal(tmp_path, commands):
    model, tokenizer = build(endless=True, chat_template=CHAT_TEMPLATE)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    words = ["chat", str(tmp_path), "--max_new_tokens", "1000000", "--seed", "0"]
    with terminals.Terminal(words, commands) as terminal:
        terminal.expect("a chat: type a message")
        terminal.expect("> ")
        terminal.send("/temperature 0.57\x7f\x1b[D9\n")  # edited: 0.5, then 0.95
        terminal.expect("temperature is 0.95")
        terminal.send("Hello\n")
        terminal.expect(r"\n[a-z]{30}")
        terminal.send("\x03")
        terminal.expect("> ")
        terminal.send("/max_n\t 3\n")  # completed
        terminal.expect("max_new_tokens is 3")
        terminal.expect("> ")  # before it, Ctrl-C would not drop the line
        terminal.send("dropped")
        terminal.expect("dropped")
        time.sleep(0.2)  # Python's readline sees no signal that comes between a letter and its waiting for the next
        terminal.send("\x03")
        terminal.expect("\n> ")
        terminal.send("/fork b\n")
        terminal.expect("b> ")
        terminal.send("more\n")
        terminal.expect("b> ")
        terminal.send("/fork\n")
        terminal.expect("main: 1 turn\r")
        terminal.expect("b: 2 turns")
        terminal.expect("b> ")
        terminal.send("\x04")
        assert terminal.wait() == 0 and "Traceback" not in terminal.output
