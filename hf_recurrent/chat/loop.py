"""The loop of `hf-recurrent chat`: lines that are typed, commands among them, and answers as they are generated."""

import contextlib
import difflib
import sys
from pathlib import Path

from transformers import set_seed

from hf_recurrent.argument_checks import expand_home
from hf_recurrent.chat.commands import COMMANDS, ChatSettings, command_table
from hf_recurrent.chat.conversation import Conversation, ConversationPartner
from hf_recurrent.data.quantities import count_of
from hf_recurrent.interruption import stop_on_signals
from hf_recurrent.modeling.tokenizer.byte_streamer import ByteStreamer

_MAIN = "main"


class ChatLoop:
    """Reads lines until Ctrl-D. Every turn leaves the conversation before it, which `/rewind` returns to.

    `/reset` returns to the conversation `begin`.
    """

    def __init__(self, partner: ConversationPartner, settings: ChatSettings, begin: Conversation) -> None:
        self._partner, self._settings, self._begin = partner, settings, begin
        self._branch, self._branches = _MAIN, {_MAIN: [begin]}
        # Text of the last turn of each branch, for /retry; None if the last action was no turn.
        self._typed: dict[str, str | None] = {}
        self._actions = {
            "/help": self._show_help,
            "/fork": self._fork,
            "/switch": self._switch,
            "/rewind": self._rewind,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self.load,
            "/reset": self._reset,
        }

    @property
    def _turns(self) -> list[Conversation]:
        """The conversation after each turn of this branch."""
        return self._branches[self._branch]

    def run(self) -> None:
        """Talk until Ctrl-D, `/quit` or the end of standard input."""
        self._edit_lines()
        if self._settings.seed is not None:
            set_seed(self._settings.seed)
        kind = "a chat: type a message" if self._partner.is_chat else "type the beginning of a text"
        print(f"{kind}; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves", file=sys.stderr)
        while True:
            try:
                line = self._input()
            except EOFError:
                if sys.stdin.isatty():
                    print()
                return
            except KeyboardInterrupt:  # the line is dropped, as in a shell
                print()
                continue
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self._act(line)
            except (ValueError, OSError) as error:
                print(error, file=sys.stderr)
            except KeyboardInterrupt:
                print("\ninterrupted; this turn is taken back", file=sys.stderr)

    def load(self, path: str) -> None:
        """Continue a saved state."""
        self._turns.append(self._partner.load(_file("/load", path)))
        self._typed.pop(self._branch, None)

    def _input(self) -> str:
        """A line, with the lines that follow one that ends in a backslash."""
        shown = "> " if self._branch == _MAIN else f"{self._branch}> "
        lines = [input(shown if sys.stdin.isatty() else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("... " if sys.stdin.isatty() else ""))
        return "\n".join(lines)

    def _act(self, line: str) -> None:
        if not line.startswith("/") or line.startswith("//"):
            self._take_turn(line.removeprefix("/") if line.startswith("//") else line)
            return
        command, _, rest = line.strip().partition(" ")
        name = command.replace("-", "_")
        if name in self._actions:
            self._actions[name](rest.strip())
        elif name in COMMANDS:
            self._change(name.removeprefix("/"), rest.strip())
        else:
            nearest = difflib.get_close_matches(name, list(COMMANDS), 1)
            hint = f"did you mean {nearest[0]}?" if nearest else "/help lists all commands."
            raise ValueError(f"unknown command {command}; {hint}")

    def _take_turn(self, typed: str) -> None:
        read = self._partner.read(self._turns[-1], typed)
        streamer = ByteStreamer(self._partner.tokenizer, skip_prompt=True, skip_special_tokens=True)
        if not self._partner.is_chat and typed and sys.stdin.isatty():
            print(typed.rpartition("\n")[2], end="", flush=True)  # the text continues on the typed line
        with stop_on_signals() as stop:
            answer = self._partner.answer(read, stop, streamer, **self._settings.options())
        if stop.number is not None and stop.number.name == "SIGTERM":
            raise SystemExit(143)
        self._turns.append(answer[1])
        self._typed[self._branch] = typed
        if answer[1].text is None:
            print("(the text has ended; your next line begins a new one)", file=sys.stderr)

    def _change(self, name: str, value: str) -> None:
        if value:
            self._settings.set(name, value, "/")
            if name == "seed":
                set_seed(self._settings.seed)
        print(f"{name} is {getattr(self._settings, name)}", file=sys.stderr)

    def _fork(self, name: str) -> None:
        if not name:
            for branch, turns in self._branches.items():
                mark = "*" if branch == self._branch else " "
                print(f"{mark} {branch}: {count_of(len(turns) - 1, 'turn')}", file=sys.stderr)
            return
        if name in self._branches:
            raise ValueError(f"`/fork` is {name!r}, which exists; /switch {name} goes there.")
        self._branches[name] = list(self._turns)  # states are never written over
        self._typed[name] = self._typed.get(self._branch)
        self._branch = name

    def _switch(self, name: str) -> None:
        if name not in self._branches:
            raise ValueError(f"`/switch` is {name!r}; it must be one of {', '.join(self._branches)}.")
        self._branch = name

    def _rewind(self, count: str) -> None:
        turns = len(self._turns) - 1
        if (count and not count.isdecimal()) or not 1 <= int(count or 1) <= turns:
            allowed = f"from 1 to {turns}" if turns else "left out, because there is nothing to take back"
            raise ValueError(f"`/rewind` is {count or 1}; it must be {allowed}.")
        del self._turns[-int(count or 1) :]
        self._typed.pop(self._branch, None)
        print(f"{count_of(int(count or 1), 'turn')} taken back", file=sys.stderr)

    def _retry(self, _: str) -> None:
        typed = self._typed.get(self._branch)
        if typed is None:
            raise ValueError("`/retry` needs an answer to replace; type some text first.")
        last = self._turns.pop()
        try:
            self._take_turn(typed)
        except BaseException:
            self._turns.append(last)
            raise

    def _save(self, path: str) -> None:
        file = _file("/save", path)
        self._partner.save(self._turns[-1], file)
        print(f"saved in {file}", file=sys.stderr)

    def _reset(self, _: str) -> None:
        self._turns[:] = [self._begin]
        self._typed.pop(self._branch, None)

    def _show_help(self, _: str) -> None:
        print(f"{command_table()}\nText that begins with / is typed with two: //text.", file=sys.stderr)

    def _edit_lines(self) -> None:
        """Editing, history and completion of commands, where the platform has readline."""
        with contextlib.suppress(ImportError):
            import readline

            def complete(text: str, number: int) -> str | None:
                words = [*COMMANDS, *(f"/switch {name}" for name in self._branches)]
                found = [word for word in words if word.startswith(text)]
                return found[number] if number < len(found) else None

            readline.set_completer_delims("")
            readline.set_completer(complete)
            readline.parse_and_bind("tab: complete")


def _file(command: str, path: str) -> Path:
    if not path:
        raise ValueError(f"`{command}` needs the name of a file.")
    return expand_home(path)
