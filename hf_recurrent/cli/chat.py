"""`hf-recurrent chat MODEL`: talk to a model whose state keeps the whole conversation."""

import argparse
from pathlib import Path

from hf_recurrent.chat.commands import ChatSettings, command_table
from hf_recurrent.cli.loading import add_loading_arguments, load_recurrent_model
from hf_recurrent.cli.parsing import CommandParser, check_file, command
from hf_recurrent.cli.sampling_arguments import add_sampling_arguments, sampling_of
from hf_recurrent.cli.threads import add_threads_argument, use_threads


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent chat",
        description="Talk to a model. Its state keeps the whole conversation, so that each turn\n"
        "reads only the new text. With a chat template in the tokenizer, a turn is a\n"
        "message and an answer; without one, the model continues what you type.",
        epilog=f"while it runs:\n{command_table()}\n\n"
        "A line that ends in \\ continues on the next one. Ctrl-C stops an answer.",
    )
    add_loading_arguments(parser)
    parser.add_argument("--system", help="system message, for a chat template")
    parser.add_argument("--plain", action="store_true", help="continue the text even if there is a chat template")
    parser.add_argument("--state", type=Path, help="begin with a state of /save or generate --save_state")
    parser.add_argument("--max_new_tokens", type=int, default=400, help="limit of a turn (default: 400)")
    add_sampling_arguments(parser)
    add_threads_argument(parser)
    return parser


def _chat(arguments: argparse.Namespace) -> None:
    settings = ChatSettings()
    for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed"):
        settings.set(name, getattr(arguments, name), "--")
    check_file("--state", arguments.state)
    model, tokenizer = load_recurrent_model(arguments)
    for name, value in sampling_of(model).items():
        if getattr(arguments, name) is None:
            settings.set(name, value, "--")

    from hf_recurrent.chat.conversation import Conversation, ConversationPartner
    from hf_recurrent.chat.loop import ChatLoop

    is_chat = bool(tokenizer.chat_template) and not arguments.plain
    begin = Conversation()
    if arguments.system is not None:
        if not is_chat:
            raise ValueError("`--system` needs a chat template, and the tokenizer of `MODEL` is used without one.")
        begin = Conversation(messages=({"role": "system", "content": arguments.system},))
    loop = ChatLoop(ConversationPartner(model, tokenizer, is_chat), settings, begin)
    if arguments.state is not None:
        loop.load(str(arguments.state))
    use_threads(arguments.threads)
    loop.run()


main = command(build_parser, _chat)
