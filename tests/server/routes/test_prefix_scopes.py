"""`cached_tokens`, seen by OpenAI's client, and who may start from whose texts."""

import openai
import pytest
from running_server import running_server

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals."
LETTERS = {str(letter): 100 for letter in b"abcdefgh ,."}  # others may not come back in a prompt


def client_of(server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)


def cached(completion) -> int:
    return completion.usage.prompt_tokens_details.cached_tokens


def ask(client: openai.OpenAI, prompt=TEXT, **options):
    arguments = {"max_tokens": 10, "temperature": 0, "logit_bias": LETTERS} | options
    return client.completions.create(model="tiny", prompt=prompt, **arguments)


def test_cached_tokens_and_equal_answers():
    with running_server() as server, client_of(server) as client:
        cold = ask(client)
        warm = ask(client)
        assert (cached(cold), cached(warm)) == (0, len(TEXT) - 1)
        assert warm.choices[0].text == cold.choices[0].text and warm.usage.prompt_tokens == len(TEXT)
        longer = TEXT + cold.choices[0].text + " And then"
        assert cached(ask(client, longer)) == len(TEXT) + 9
        # Several choices and prompts; the prompt of several choices is counted once.
        assert cached(ask(client, longer, n=3)) == len(longer) - 1
        assert cached(ask(client, [longer, TEXT])) == len(longer) + len(TEXT) - 2
        pieces = list(ask(client, longer, stream=True, stream_options={"include_usage": True}))
        assert cached(pieces[-1]) == len(longer) - 1
        assert cached(ask(client, longer, echo=True, logprobs=0)) == 0
        session = server.new_session()
        assert cached(ask(client, TEXT, extra_body={"session": session})) == 0
        metrics = server.request("GET", "/metrics").body.decode()
        assert "hf_recurrent_reused_bytes_total 0" not in metrics and "hf_recurrent_stored_prefixes " in metrics


def test_each_of_several_answers_can_be_continued():
    with running_server() as server, client_of(server) as client:
        found = ask(client, n=3, temperature=1, seed=1)
        for choice in found.choices:
            assert cached(ask(client, TEXT + choice.text + "x")) == len(TEXT) + 9


def test_a_chat_reads_new_messages_only():
    tokenizer = ByteTokenizer(chat_template=CHAT_TEMPLATE)
    with running_server(tokenizer=tokenizer) as server, client_of(server) as client:
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello"}]
        options = {"model": "tiny", "max_tokens": 20, "temperature": 0, "logit_bias": LETTERS}
        first = client.chat.completions.create(messages=messages, **options)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        longer = [*messages, answer, {"role": "user", "content": "Why?"}]
        second = client.chat.completions.create(messages=longer, **options)
        old = first.usage.prompt_tokens + first.usage.completion_tokens
        assert (cached(first), cached(second)) == (0, old - 1)
        # Another chat with the same system message, and another last question.
        system = len(f"system\n{TEXT}\0")
        other = client.chat.completions.create(messages=[messages[0], {"role": "user", "content": "Bye"}], **options)
        assert cached(other) == system
        changed = [*longer[:-1], {"role": "user", "content": "Who?"}]
        assert cached(client.chat.completions.create(messages=changed, **options)) == old + 1
        again = client.chat.completions.create(messages=longer, **options)
        assert again.choices[0].message == second.choices[0].message and cached(again) > cached(second)


@pytest.mark.parametrize("shares", [False, True])
def test_keys_and_salts_keep_texts_apart(shares):
    """Without --share_prefixes, nobody can tell what the owner of another key has sent."""
    with running_server(shares_prefixes=shares) as server:
        everything = len(TEXT) - 1
        with client_of(server, "one") as one, client_of(server, "two") as two:
            assert [cached(ask(client)) for client in (one, one, two, two)] == [
                0,
                everything,
                everything if shares else 0,
                everything,
            ]
            salts = ["a", "a", "b"]
            assert [cached(ask(one, extra_body={"cache_salt": salt})) for salt in salts] == [0, everything, 0]
            assert cached(ask(two, extra_body={"cache_salt": "a"})) == (everything if shares else 0)


@pytest.mark.parametrize("shares", [False, True])
def test_strangers_without_a_key_share_nothing(shares):
    with running_server(is_public=True, shares_prefixes=shares) as server:
        body = {"prompt": TEXT, "max_tokens": 1}
        usages = [server.complete(**body)["usage"] for _ in range(2)]
        expected = len(TEXT) - 1 if shares else 0
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, expected]
        salted = [server.complete(**body, cache_salt="mine")["usage"] for _ in range(2)]
        assert salted[1]["prompt_tokens_details"]["cached_tokens"] == len(TEXT) - 1
        with client_of(server, "own") as client:
            assert [cached(ask(client)) for _ in range(2)] == [expected, len(TEXT) - 1]
