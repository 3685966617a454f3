"""Turns of a conversation are one text, or messages of a chat template."""

import threading

import torch
from chat_models import build

from hf_recurrent import CHAT_TEMPLATE
from hf_recurrent.chat.conversation import Conversation, ConversationPartner

GREEDY = {"do_sample": False, "max_new_tokens": 12}
NEVER = threading.Event()


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
