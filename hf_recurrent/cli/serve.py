"""`hf-recurrent serve MODEL`: a server for models whose memory is a state, ours and transformers'."""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hf_recurrent
from hf_recurrent.cli.learn import METHODS
from hf_recurrent.cli.loading import add_loading_arguments, load_model_and_tokenizer, load_recurrent_model
from hf_recurrent.cli.parsing import CommandParser, check_at_least, check_model_name, command, dataclass_of, read_text
from hf_recurrent.cli.threads import add_threads_argument, use_threads

if TYPE_CHECKING:
    import socket

    from hf_recurrent.server.routes.settings import ServerSettings
    from hf_recurrent.server.serving import Learning

_KEY_VARIABLE = "HF_RECURRENT_API_KEY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-recurrent serve",
        description="Serve a model over HTTP: OpenAI's completions, and sessions, which are states. A\n"
        "session costs the same at any length, and can be forked, rewound and downloaded.",
        epilog="examples:\n"
        "  hf-recurrent serve runs/hawk --session_dir sessions\n"
        "  hf-recurrent serve runs/hawk --learn --output_dir runs/hawk-learned\n"
        f"  {_KEY_VARIABLE}=... hf-recurrent serve runs/hawk --host 0.0.0.0\n\n"
        "then, elsewhere:\n"
        "  curl http://127.0.0.1:8000/v1/completions \\\n"
        "    -H 'content-type: application/json' \\\n"
        '    -d \'{"model": "hawk", "prompt": "def ", "max_tokens": 40}\'\n\n'
        "Ctrl-C ends all requests where they are and saves all sessions.",
    )
    add_loading_arguments(parser)
    parser.add_argument("--name", help="name of the model for clients (default: the last part of MODEL)")
    _add_network_arguments(parser)
    _add_storage_arguments(parser)
    add = parser.add_argument_group("limits").add_argument
    add("--max_rows", type=int, default=128, help="texts that generate at a time; more take turns (default: 128)")
    add("--max_waiting", type=int, default=512, help="requests in all; more get 429 (default: 512)")
    add("--max_body", type=int, default=1 << 22, help="bytes of a request's body (default: 4194304)")
    add("--max_new_tokens", type=int, default=1 << 16, help="new bytes of a request (default: 65536)")
    add("--stop_seconds", type=float, default=5.0, help="that requests have left when the server stops (default: 5)")
    add("--max_seconds", type=float, default=600.0, help="seconds of a request (default: 600)")
    add(
        "--block",
        type=int,
        help="tokens that a model of transformers reads at once; more than 1 is faster "
        "and reads the last answer again (default: 1 on a CPU, 64 elsewhere)",
    )
    _add_learning_arguments(parser)
    add = parser.add_argument
    add("--processes", type=int, default=1, help="of one port; they share stored texts, not sessions (default: 1)")
    add_threads_argument(parser)
    add("--log", metavar="FILE", help="a line of JSON for each request, without its content; - for standard error")
    template = "in place of the tokenizer's; 'default' for hf_recurrent.CHAT_TEMPLATE"
    add("--chat_template", metavar="FILE", help=template)
    add("--quiet", action="store_true", help="print errors only")
    return parser


def _add_network_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("network").add_argument
    host = "addresses other than loopback require an API key (default: 127.0.0.1)"
    add("--host", default="127.0.0.1", help=host)
    add("--port", type=int, default=8000, help="0 for any free one (default: 8000)")
    add("--no_page", action="store_true", help="no page at /")
    add("--api_key", help=f"key that every request must have; better in the variable {_KEY_VARIABLE}")
    keys = "lines of NAME KEY, or NAME sha256:HASH, and limits of this key"
    add("--api_keys", type=Path, metavar="FILE", help=keys)
    origins = "origin whose pages may use the server; * for all"
    add("--cors", metavar="ORIGIN", action="append", default=[], help=origins)
    public = "no key: anyone may use the server; sessions are not listed, and the least recently used make room"
    add("--public", action="store_true", help=public)


def _add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sessions").add_argument
    add("--session_dir", type=Path, help="keep sessions here, also when the process is killed")
    add("--max_sessions", type=int, default=20_000, help="with their marks (default: 20000)")
    add("--max_resident", type=int, default=1000, help="sessions in memory, with --session_dir (default: 1000)")
    add = parser.add_argument_group("texts that begin alike").add_argument
    states = "bytes of stored states of texts; 0 to read every text anew (default: 268435456)"
    add("--prefix_bytes", type=int, default=1 << 28, help=states)
    add("--store", metavar="ADDRESS", help="of what servers share: a directory, redis://... or any of fsspec")
    add("--store_bytes", type=int, default=1 << 28, help="bytes in it; the oldest leave (default: 268435456)")
    add("--share_prefixes", action="store_true", help="also between clients with other API keys")


def _add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("learning").add_argument
    add("--learn", action="store_true", help="learn from the text that sessions with `learns` read")
    adapter = "each of these sessions has weights of its own (default: 0, none)"
    add("--adapter_rank", type=int, default=0, help=adapter)
    add("--output_dir", type=Path, help="checkpoints, for --learn; the last one is continued")
    add("--method", default="truncated", choices=METHODS, help="as for learn (default: truncated)")
    add("--stride", type=int, default=16, help="bytes per learning step (default: 16)")
    add("--learning_rate", type=float, default=3e-5, help="constant (default: 3e-5)")
    add("--save_every", type=int, default=100_000, help="bytes between checkpoints")


def _serve(arguments: argparse.Namespace) -> None:
    api_key = _check(arguments)
    check_model_name("MODEL", arguments.model)
    try:
        from hf_recurrent.server.routes import app
    except ImportError as error:
        raise ImportError(f'serve needs more packages: pip install "hf-recurrent[serve]" ({error}).') from error
    settings, report = _settings(arguments, api_key), partial(_report, arguments)
    if arguments.processes == 1:
        _serve_alone(arguments, settings, None, report)
        return

    from hf_recurrent.server.processes import Processes

    settings = dataclasses.replace(settings, has_sessions=False, has_page=False)
    with app.listen(arguments.host, arguments.port) as listener, _common_store(arguments) as store:
        shared = argparse.Namespace(**vars(arguments) | {"store": store, "session_dir": None})
        run = partial(_serve_alone, shared, settings, listener)
        processes = Processes(arguments.processes, lambda is_ready: run(lambda *_: is_ready()))
        processes.serve(lambda: report(settings, listener))


def _serve_alone(
    arguments: argparse.Namespace,
    settings: "ServerSettings",
    listener: "socket.socket | None",
    report: Callable[["ServerSettings", "socket.socket"], None],
) -> None:
    """Serve in this process; without a listening socket, on a new one of the arguments."""
    arguments.learning = _learning(arguments)
    if arguments.learn:
        hint = "; --learn needs one of hf_recurrent, or a stock model of bytes."
        model, tokenizer = load_recurrent_model(arguments, hint)
    else:
        model, tokenizer = load_model_and_tokenizer(arguments)
    if arguments.chat_template == "default":
        tokenizer.chat_template = hf_recurrent.CHAT_TEMPLATE
    elif arguments.chat_template is not None:
        tokenizer.chat_template = read_text("--chat_template", Path(arguments.chat_template))
    # The page shows bytes.
    settings = dataclasses.replace(settings, has_page=settings.has_page and hasattr(tokenizer, "encode_bytes"))
    use_threads(arguments.threads, quiet=arguments.quiet)

    from hf_recurrent.server.routes import app, served_model
    from hf_recurrent.server.serving import ServingOptions, serving_scheduler
    from hf_recurrent.stock_models.caches import SUPPORTED, UnsupportedCache

    try:
        with serving_scheduler(model, tokenizer, **vars(dataclass_of(ServingOptions, arguments))) as scheduler:
            if not arguments.quiet and (notice := scheduler.steps.notice(arguments.prefix_bytes)):
                print(notice, file=sys.stderr, flush=True)
            listener = listener or app.listen(arguments.host, arguments.port)
            served = served_model.ServedModel(scheduler, tokenizer, settings)
            app.run_server(served, listener, partial(report, settings, listener))
    except UnsupportedCache as error:
        raise ValueError(
            f"`MODEL` is {arguments.model!r}, a {type(model).__name__}: {error}. This command serves recurrent "
            f"models: of hf_recurrent, and of transformers {SUPPORTED}."
        ) from error


def _settings(arguments: argparse.Namespace, api_key: str | None) -> "ServerSettings":
    from hf_recurrent.server.routes import api_keys, request_log, settings

    keys = () if arguments.api_keys is None else api_keys.read_api_keys(arguments.api_keys)
    log = None
    if arguments.log is not None:
        log = request_log.RequestLog(None if arguments.log == "-" else Path(arguments.log))
        log.take_messages()
    is_local = arguments.host in _LOOPBACK and api_key is None and not (keys or arguments.public)
    limits = {name: getattr(arguments, name) for name in ("max_body", "max_new_tokens", "stop_seconds")}
    return settings.ServerSettings(
        name=arguments.name or Path(arguments.model).absolute().name,
        api_key=api_key,
        api_keys=keys,
        hosts=settings.LOOPBACK_HOSTS if is_local else None,
        cors=tuple(arguments.cors),
        log=log,
        has_page=not arguments.no_page,
        is_public=arguments.public,
        shares_prefixes=arguments.share_prefixes,
        limits=settings.ServerLimits(seconds=arguments.max_seconds, **limits),
    )


def _report(arguments: argparse.Namespace, settings: "ServerSettings", listener: "socket.socket") -> None:
    if not arguments.quiet:
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        page = f", with a page on {address}/" if settings.has_page else ""
        print(f"{settings.name} is served on {address}/v1{page}", file=sys.stderr, flush=True)


@contextmanager
def _common_store(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of the store that processes share."""
    if arguments.store is not None or arguments.session_dir is not None:
        yield arguments.store or os.path.abspath(arguments.session_dir / "store")
        return
    with tempfile.TemporaryDirectory(prefix="hf-recurrent-") as folder:
        yield folder


def _check(arguments: argparse.Namespace) -> str | None:
    """Raise a ValueError that names the first wrong argument; returns the key."""
    has_key_file = arguments.api_keys is not None
    names = ("max_sessions", "max_resident", "max_rows", "max_waiting", "max_body", "max_new_tokens", "save_every")
    check_at_least(1, arguments, "processes", "block", *names)
    check_at_least(0, arguments, "adapter_rank", "port", "prefix_bytes", "store_bytes", "stop_seconds")
    if arguments.port > 65535:
        raise ValueError(f"`--port` is {arguments.port}; it must be at most 65535.")
    if arguments.max_rows > 256:
        raise ValueError(f"`--max_rows` is {arguments.max_rows}; it must be at most 256.")
    if not arguments.max_seconds > 0:
        raise ValueError(f"`--max_seconds` is {arguments.max_seconds}; it must be more than 0.")
    api_key = arguments.api_key if arguments.api_key is not None else os.environ.get(_KEY_VARIABLE)
    if api_key is not None and (not api_key.strip() or not api_key.isprintable() or not api_key.isascii()):
        raise ValueError("`--api_key` is empty or has characters that a header cannot have.")
    has_key = api_key is not None or has_key_file
    if api_key is not None and has_key_file:
        raise ValueError("`--api_keys` does not go with `--api_key` and its variable; add the key to the file.")
    if arguments.public and (has_key or arguments.session_dir is not None or arguments.learn):
        raise ValueError("`--public` does not go with an API key, `--session_dir` or `--learn`.")
    if not has_key and arguments.host not in _LOOPBACK and not arguments.public:
        raise ValueError(
            f"`--host` is {arguments.host!r}, which other machines reach; give a key in the variable {_KEY_VARIABLE}, "
            "or `--api_keys`."
        )
    if arguments.share_prefixes and (arguments.learn or not arguments.prefix_bytes):
        raise ValueError("`--share_prefixes` does not go with `--learn` or `--prefix_bytes 0`, which store no texts.")
    if arguments.processes > 1 and (arguments.learn or not hasattr(os, "fork")):
        raise ValueError(f"`--processes` is {arguments.processes}; with `--learn` and on Windows, it must be 1.")
    if arguments.adapter_rank and (arguments.learn or arguments.processes > 1):
        raise ValueError("`--adapter_rank` does not go with `--learn`, which changes the model, or `--processes`.")
    if arguments.learn and arguments.output_dir is None:
        raise ValueError("`--learn` needs `--output_dir`, where the checkpoints are written.")
    if arguments.output_dir is not None and not arguments.learn:
        raise ValueError(f"`--output_dir` is {str(arguments.output_dir)!r}, which needs `--learn`.")
    return api_key


def _learning(arguments: argparse.Namespace) -> "Learning | None":
    if not arguments.learn:
        return None
    from hf_recurrent.online.settings import LearnerSettings
    from hf_recurrent.server.serving import Learning

    settings = LearnerSettings(rule=arguments.method, stride=arguments.stride, learning_rate=arguments.learning_rate)
    return Learning(settings, arguments.output_dir, arguments.save_every)


main = command(build_parser, _serve)
