"""Commands and settings of `hf-recurrent chat`; importing them takes no time."""

from dataclasses import dataclass
from typing import Any

from hf_recurrent.argument_checks import check_numbers, check_sampling

# Command → its arguments and help.
COMMANDS = {
    "/help": ("", "this list"),
    "/fork": ("NAME", "continue in a copy; without NAME, list all copies"),
    "/switch": ("NAME", "continue in another copy; the first one is main"),
    "/rewind": ("[N]", "take back the last turns (default: 1)"),
    "/retry": ("", "another answer to the last turn"),
    "/save": ("FILE", "save the state"),
    "/load": ("FILE", "continue a saved state"),
    "/reset": ("", "begin anew"),
    "/temperature": ("[X]", "show or set it; 0 takes the most likely token"),
    "/top_k": ("[K]", "sample only from the K most likely tokens; 0 for all"),
    "/top_p": ("[P]", "sample from the most likely tokens of this probability"),
    "/max_new_tokens": ("[N]", "limit of a turn"),
    "/seed": ("[N]", "make sampling reproducible from here"),
    "/quit": ("", "leave, as Ctrl-D"),
}


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

    def set(self, name: str, value: Any, prefix: str) -> None:
        """Change a setting, from a number or its text; None leaves it.

        Raises a ValueError, which names the setting with the prefix, if the number is malformed or out of range.
        """
        if value is None:
            return
        is_whole = name in ("top_k", "max_new_tokens", "seed")
        try:
            number = int(value) if is_whole else float(value)
        except ValueError:
            kind = "a whole" if is_whole else "a"
            raise ValueError(f"`{prefix}{name}` is {value!r}; it must be {kind} number.") from None
        check_numbers({name: number}, prefix)
        if name in ("temperature", "top_k", "top_p"):
            check_sampling(**{name: number}, prefix=prefix)
        elif name == "max_new_tokens" and number < 1:
            raise ValueError(f"`{prefix}{name}` is {number}; it must be at least 1.")
        setattr(self, name, number)

    def options(self) -> dict[str, Any]:
        """Arguments of `generate()`."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        is_sampled = bool(self.temperature)
        return {"do_sample": is_sampled, "max_new_tokens": self.max_new_tokens} | (sampling if is_sampled else {})
