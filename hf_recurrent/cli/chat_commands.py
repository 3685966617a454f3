"""Commands and settings of `hf-recurrent chat`; importing them takes no time."""

from dataclasses import dataclass
from typing import Any

from hf_recurrent.argument_checks import check_numbers

# Command → its arguments and help.
COMMANDS = {
    "/help": ("", "this list"),
    "/fork": ("NAME", "go on in a copy; without NAME, list all copies"),
    "/switch": ("NAME", "go on in another copy; the first one is main"),
    "/rewind": ("[N]", "take back the last turns (default: 1)"),
    "/retry": ("", "another answer to the last turn"),
    "/save": ("FILE", "save the state"),
    "/load": ("FILE", "go on from a saved state"),
    "/reset": ("", "begin anew"),
    "/temperature": ("[X]", "show or set it; 0 takes the most likely token"),
    "/top_k": ("[K]", "sample only from the K most likely tokens; 0 for all"),
    "/top_p": ("[P]", "sample from the most likely tokens of this probability"),
    "/max_new_tokens": ("[N]", "of a turn"),
    "/seed": ("[N]", "make sampling reproducible from here"),
    "/quit": ("", "leave, as Ctrl-D"),
}
# Logits divided by less would be infinite, and their differences NaN.
_LEAST_TEMPERATURE = 1e-6


def command_table() -> str:
    """All commands with their arguments and help, one per line."""
    width = max(len(f"{name} {words}") for name, (words, _) in COMMANDS.items())
    return "\n".join(f"  {f'{name} {words}':<{width}}  {text}" for name, (words, text) in COMMANDS.items())


@dataclass
class ChatSettings:
    """Settings of sampling, which commands change."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 400
    seed: int | None = None

    def set(self, name: str, value: Any, label: str) -> None:
        """Change a setting, from a number or its text.

        Raises:
            ValueError: it is not a number, or not an allowed one; the message names it `label`.
        """
        if value is None:
            return
        is_whole = name in ("top_k", "max_new_tokens", "seed")
        try:
            number = int(value) if is_whole else float(value)
        except ValueError:
            raise ValueError(f"`{label}` is {value!r}; it must be {'a whole' if is_whole else 'a'} number.") from None
        check_numbers({label.strip("-/"): number}, label.removesuffix(name))
        words = {
            "temperature": (number == 0 or number >= _LEAST_TEMPERATURE, f"0 or at least {_LEAST_TEMPERATURE}"),
            "top_k": (number >= 0, "at least 0"),
            "top_p": (0 < number <= 1, "more than 0 and at most 1"),
            "max_new_tokens": (number >= 1, "at least 1"),
        }
        is_allowed, allowed = words.get(name, (True, ""))
        if not is_allowed:
            raise ValueError(f"`{label}` is {number}; it must be {allowed}.")
        setattr(self, name, number)

    def options(self) -> dict[str, Any]:
        """Arguments of `generate()`."""
        if not self.temperature:
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        names = ("temperature", "top_k", "top_p", "max_new_tokens")
        return {"do_sample": True} | {name: getattr(self, name) for name in names}
