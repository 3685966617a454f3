"""`hf-recurrent chat`: turns, branches and a terminal."""

import threading
import time

import pytest
import terminals
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer, config_from_preset
from hf_recurrent.chat.commands import COMMANDS, ChatSettings
from hf_recurrent.chat.conversation import Conversation, ConversationPartner
from hf_recurrent.chat.loop import ChatLoop
from hf_recurrent.cli import chat
from hf_recurrent.cli.main import main

GREEDY = {"do_sample": False, "max_new_tokens": 12}
NEVER = threading.Event()


def build(endless: bool = False, **options):
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": False}
    sizes |= {"eos_token_id": None} if endless else {}
    model = AutoModelForCausalLM.from_config(config_from_preset("hawk-tiny", **sizes)).double().eval()
    with torch.no_grad():  # it says small letters
        weight = torch.zeros_like(model.lm_head.weight)
        weight[97:123] = 2 * torch.randn(26, weight.shape[1])
        model.lm_head.weight.copy_(weight)
    return model, ByteTokenizer(**options)


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode("utf-8", "surrogateescape"))])


def after(model, text: str):
    """Logits after a text, read at once."""
    with torch.no_grad():
        return model(ids_of(text)).logits[0, -1]


def next_logits(partner, conversation):
    """Logits after a conversation, from its state."""
    pending = torch.tensor([conversation.text.pending])
    with torch.no_grad():
        return partner.model(pending, state=conversation.text.state).logits[0, -1]


def test_plain_turns_are_one_text():
    partner = ConversationPartner(*build(endless=True), is_chat=False)
    whole, conversation = "", Conversation()
    for typed in ("def main(", "", "\n    café", "\udcff"):
        conversation = partner.read(conversation, typed)
        answer, conversation = partner.answer(conversation, NEVER, **GREEDY)
        whole += typed + answer
        torch.testing.assert_close(next_logits(partner, conversation), after(partner.model, whole))


def test_messages_are_read_as_the_template_says():
    partner = ConversationPartner(*build(chat_template=CHAT_TEMPLATE), is_chat=True)
    system = {"role": "system", "content": "Be brief."}
    conversation = Conversation(messages=(system,))
    for typed in ("Hi", "And now?", "Bye"):
        read = partner.read(conversation, typed)
        rendered = partner.tokenizer.apply_chat_template(
            list(read.messages), tokenize=False, add_generation_prompt=True
        )
        assert read.messages[:-1] == conversation.messages and rendered.endswith(f"user\n{typed}\0assistant\n")
        torch.testing.assert_close(next_logits(partner, read), after(partner.model, rendered))
        expected = partner.model.generate(ids_of(rendered), **GREEDY)[0, ids_of(rendered).shape[1] :]
        answer, conversation = partner.answer(read, NEVER, **GREEDY)
        assert answer == partner.tokenizer.decode(expected, skip_special_tokens=True, errors="surrogateescape")
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_an_answer_that_ends_with_byte_0_is_a_message():
    model, tokenizer = build(chat_template=CHAT_TEMPLATE)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # byte 0 is the first of equal logits
    partner = ConversationPartner(model, tokenizer, is_chat=True)
    answer, conversation = partner.answer(partner.read(Conversation(), "Hi"), NEVER, **GREEDY)
    assert answer == "" and conversation.text.pending == [0] and conversation.read == "user\nHi\0assistant\n\0"
    read = partner.read(conversation, "Again")
    assert read.read == "user\nHi\0assistant\n\0user\nAgain\0assistant\n"
    plain = ConversationPartner(model, tokenizer, is_chat=False)
    assert plain.answer(plain.read(Conversation(), "Hi"), NEVER, **GREEDY) == ("", Conversation())


def test_templates_that_change_earlier_messages_are_read_again():
    template = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}:"
    partner = ConversationPartner(*build(endless=True, chat_template=template), is_chat=True)
    _, conversation = partner.answer(partner.read(Conversation(), "Hi"), NEVER, **GREEDY)
    read = partner.read(conversation, "Later")
    torch.testing.assert_close(next_logits(partner, read), after(partner.model, "Later:"))


def test_the_event_ends_an_answer():
    partner = ConversationPartner(*build(endless=True), is_chat=False)
    stop = threading.Event()
    stop.set()
    answer, _ = partner.answer(partner.read(Conversation(), "Hi"), stop, do_sample=False, max_new_tokens=1000)
    assert len(answer.encode("utf-8", "surrogateescape")) == 1


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs lines in a loop of plain text or of a chat, and returns its output, its errors, and the loop."""

    def run(*lines: str, is_chat: bool = False, **settings):
        model, tokenizer = build(endless=True, chat_template=CHAT_TEMPLATE)
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
def test_in_a_terminal(tmp_path):
    model, tokenizer = build(endless=True, chat_template=CHAT_TEMPLATE)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    words = ["chat", str(tmp_path), "--max_new_tokens", "1000000", "--seed", "0"]
    with terminals.Terminal(words, environment={"OMP_NUM_THREADS": "1"}) as terminal:
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
