"""The loop of a chat: branches, commands and settings."""

import pytest
from chat_models import build

from hf_recurrent import CHAT_TEMPLATE
from hf_recurrent.chat.commands import COMMANDS, ChatSettings
from hf_recurrent.chat.conversation import Conversation, ConversationPartner
from hf_recurrent.chat.loop import ChatLoop
from hf_recurrent.cli import chat


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs lines in a loop of plain text or of a chat, and returns its output, its errors, and the loop."""

    def run(*lines: str, is_chat: bool = False, template: str = CHAT_TEMPLATE, **settings):
        model, tokenizer = build(endless=True, chat_template=template)
        waiting = iter(lines)

        def type_line(prompt: str) -> str:
            line = next(waiting, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", type_line)
        monkeypatch.setattr(ChatLoop, "_edit_lines", lambda self: None)
        chosen = ChatSettings(**{"temperature": 0.0, "max_new_tokens": 6} | settings)
        loop = ChatLoop(ConversationPartner(model, tokenizer, is_chat), chosen, Conversation())
        loop.run()
        captured = capsys.readouterr()
        return captured.out, captured.err.splitlines()[1:], loop

    return run


def test_rewind_and_retry(say):
    once = say("one")[0]
    out, errors, loop = say("one", "two", "/rewind", "/rewind", "one")
    assert out.startswith(once) and out.endswith(once) and len(loop._turns) == 2
    assert errors == ["1 turn taken back", "1 turn taken back"]
    assert say("one", "/retry")[0] == once * 2
    sampled = say("/seed 5", "one", "/retry", "/seed 5", "/retry", temperature=1.0)[0].splitlines()
    assert len(say("one", "/retry", "two", "/retry")[2]._turns) == 3
    assert sampled[0] == sampled[-1] and len(set(sampled)) > 1


def test_fork_and_switch(say):
    out, errors, _ = say("one", "/fork b", "two", "/switch main", "two", "/fork")
    first, left, right = out.splitlines()
    assert left == right != first
    assert errors == ["* main: 2 turns", "  b: 2 turns"]
    _, errors, _ = say("/fork b", "/fork b", "/switch c")
    assert errors == [
        "`/fork` is 'b', which exists; /switch b goes there.",
        "`/switch` is 'c'; it must be one of main, b.",
    ]


@pytest.mark.parametrize("is_chat", [False, True])
def test_save_load_and_reset(say, tmp_path, is_chat):
    file = tmp_path / "state.safetensors"
    lines = ["one", f"/save {file}", "two", "/reset", "/rewind", f"/load {file}", "two"]
    out, errors, _ = say(*lines, is_chat=is_chat)
    _, second, third = out.splitlines()
    assert second == third
    assert errors == [
        f"saved in {file}",
        "`/rewind` is 1; it must be left out, because there is nothing to take back.",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "There is nothing to continue; type some text first."),
        ("/retry", "`/retry` needs an answer to replace; type some text first."),
        ("/save s", "There is no state to save; type some text first."),
        ("/save", "`/save` needs the name of a file."),
        ("/load absent", "There is no saved state at `absent`."),
        ("/load ~nouser/s", "There is no saved state at `~nouser/s`."),
        ("/rewind x", "`/rewind` is x; it must be left out"),
        ("/temprature 3", "unknown command /temprature; did you mean /temperature?"),
        ("/xyz", "unknown command /xyz; /help lists"),
        ("/temperature hot", "`/temperature` is 'hot'; it must be a number."),
        ("/temperature nan", "`/temperature` is nan; it must be a finite number"),
        ("/temperature -1", "`/temperature` is -1.0; it must be 0 or at least 1e-06."),
        ("/top-k 1.5", "`/top_k` is '1.5'; it must be a whole number."),
        ("/top_p 2", "`/top_p` is 2.0; it must be more than 0 and at most 1."),
        ("/seed -1", "`/seed` is -1; it must be from 0 to 4294967295."),
        ("/temperature", "temperature is 0.0"),
        ("/max_new_tokens 9", "max_new_tokens is 9"),
    ],
)
def test_lines_that_are_answered_with_a_sentence(line, message, say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, errors, loop = say(line)
    assert not out and len(errors) == 1 and message in errors[0] and len(loop._turns) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ().__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no\nsystem message.') }}", "TemplateError: no system message)"),
        ("{% for message in %}", "TemplateSyntaxError: "),
    ],
)
def test_a_chat_template_that_fails_is_named(template, reason, say):
    out, errors, loop = say("Hi", is_chat=True, template=template)
    assert not out and len(errors) == 1 and len(loop._turns) == 1
    assert errors[0].startswith("The tokenizer's chat template fails (") and reason in errors[0]


def test_lines_are_joined_and_slashes_escaped(say):
    _, _, loop = say("first\\", "second", is_chat=True)
    assert loop._turns[-1].messages[0]["content"] == "first\nsecond"
    _, _, loop = say("//help", is_chat=True)
    assert loop._turns[-1].messages[0]["content"] == "/help"


def test_every_command_is_listed(say):
    _, errors, loop = say("/help")
    assert all(any(line.split()[0] == name for line in errors) for name in COMMANDS)
    assert all(name in chat.build_parser().epilog for name in COMMANDS)
    assert set(loop._actions) <= set(COMMANDS)
