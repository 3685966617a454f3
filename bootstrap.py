"""Set up an environment in `.venv` and run the main job or the tests; needs Python 3.11 or newer and nothing else.

python3 bootstrap.py train [arguments of hf-recurrent pretrain]
python3 bootstrap.py test [arguments of pytest]

The first run installs, which takes minutes; later runs start at once. `--print` before the word shows the commands
and runs none of them.
"""

import hashlib
import os
import shlex
import subprocess
import sys

OLDEST_PYTHON = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
TORCH = "torch==2.13.0"
EXTRAS = {"train": "", "test": "dev"}
USAGE = "usage: python3 bootstrap.py [--print] {train,test} [arguments of the command]"


def fail(message):
    """End with one sentence on the standard error stream."""
    raise SystemExit("bootstrap.py: " + message)


def venv_python(environment):
    """The interpreter of a virtual environment."""
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return os.path.join(environment, folder, name)


def fingerprint(root, extra):
    """What an installation depends on: the project's description, the extra, torch and this Python."""
    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        description = file.read()
    parts = [description, extra.encode(), TORCH.encode(), sys.version.encode(), root.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def stamp_path(environment, extra):
    """The file that is written when an installation is complete; it holds the fingerprint."""
    return os.path.join(environment, f"installed-{extra or 'base'}.txt")


def is_installed(root, environment, extra):
    """Whether the environment was completely set up, with this extra or more, for this very state of the project."""
    if not os.path.exists(venv_python(environment)):
        return False
    for installed in {extra, "dev"}:
        try:
            with open(stamp_path(environment, installed), encoding="utf-8") as file:
                if file.read().strip() == fingerprint(root, installed):
                    return True
        except OSError:
            continue
    return False


def has_pip(environment):
    """Whether the environment exists and was completely created."""
    try:
        check = [venv_python(environment), "-m", "pip", "--version"]
        return subprocess.run(check, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def install_commands(root, environment, extra):
    """The commands that set the environment up, in order, each with what it does.

    torch goes first, so that its build is the one named here and not whatever the project's range allows.
    """
    pip = [venv_python(environment), "-m", "pip", "install", "--disable-pip-version-check"]
    project = root + (f"[{extra}]" if extra else "")
    commands = [("Installing torch", [*pip, TORCH]), ("Installing the project", [*pip, "--editable", project])]
    if not has_pip(environment):
        commands.insert(0, ("Creating .venv", [sys.executable, "-m", "venv", environment]))
    return commands


def job_command(environment, job, arguments):
    """The command that the user came for."""
    if job == "test":
        # Side by side, the tests of a file in one process: some share runs that take long.
        return [venv_python(environment), "-m", "pytest", "-n", "logical", "--dist", "loadfile", *arguments]
    name = "hf-recurrent.exe" if os.name == "nt" else "hf-recurrent"
    return [os.path.join(os.path.dirname(venv_python(environment)), name), "pretrain", *arguments]


def show(command):
    """Print a command as it would be typed."""
    print("+ " + shlex.join(command), flush=True)


def install(root, environment, extra):
    """Run the installation and stamp it; a step that fails ends this program with a sentence that names it."""
    for what, command in install_commands(root, environment, extra):
        show(command)
        try:
            status = subprocess.run(command, check=False).returncode
        except OSError as error:
            fail(f"{what} could not start: {error}.")
        if status:
            hint = " On Debian and Ubuntu, python3-venv has to be installed first." if "venv" in command else ""
            fail(f"{what} failed with status {status}; the lines above say why.{hint} The same command goes on there.")
    with open(stamp_path(environment, extra), "w", encoding="utf-8") as file:
        file.write(fingerprint(root, extra) + "\n")


def main(arguments):
    """Install what is missing, then become the job."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        fail(f"Python {oldest} or newer is needed; this is {sys.version.split()[0]}.")
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    only_print = arguments[:1] == ["--print"]
    job, *rest = arguments[only_print:] or [""]
    if job not in EXTRAS:
        fail(f"the first argument is {job!r}; it must be train or test.\n{USAGE}")
    environment, extra = os.path.join(ROOT, ".venv"), EXTRAS[job]
    command = job_command(environment, job, rest)
    installed = is_installed(ROOT, environment, extra)
    if only_print:
        for line in [
            *([] if installed else [line for _, line in install_commands(ROOT, environment, extra)]),
            command,
        ]:
            show(line)
        return 0
    if not installed:
        install(ROOT, environment, extra)
    show(command)
    if job == "test":
        os.chdir(ROOT)
    if os.name == "nt":
        return subprocess.run(command, check=False).returncode
    os.execv(command[0], command)  # so that signals, such as Ctrl-C, reach the job and nothing else


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
