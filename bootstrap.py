"""Set up a virtual environment and train or test in it. Requires Python 3.11 or newer and nothing else.

python3 bootstrap.py train [arguments of hf-recurrent pretrain]
python3 bootstrap.py test [--smoke] [arguments of pytest]
python3 bootstrap.py test-oldest [arguments of pytest]

`test --smoke` runs the tests listed in tests/smoke.txt: every family and every command, in less than a minute.
`test-oldest` installs the oldest version of every dependency that pyproject.toml allows, in `.venv-oldest`, and runs
the short suite listed in tests/oldest.txt, unless arguments are given. The others use `.venv`. The first run installs,
which takes minutes; later runs start at once. With `--print` before the command name, the commands are shown and not
run.
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys

OLDEST_PYTHON = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
TORCH = "torch==2.13.0"
EXTRAS = {"train": "baselines", "test": "dev", "test-oldest": "dev"}
ALL_EXTRAS = EXTRAS["test"]
USAGE = "usage: python3 bootstrap.py [--print] {train,test,test-oldest} [arguments]"


def fail(message):
    """Exit with a one-sentence error message."""
    raise SystemExit("bootstrap.py: " + message)


def venv_python(environment):
    """The interpreter of a virtual environment."""
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return os.path.join(environment, folder, name)


def fingerprint(root, extra):
    """A hash of everything an installation depends on: pyproject.toml, the extra, torch and this Python."""
    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        description = file.read()
    parts = [description, extra.encode(), TORCH.encode(), sys.version.encode(), root.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def oldest_requirements(root):
    """The lower bound of every dependency in pyproject.toml, pinned: "numpy>=2.0,<3" gives "numpy==2.0"."""
    import tomllib  # not at the top: an older Python has to reach the message about its version

    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    extras = dict(project["optional-dependencies"])
    requirements = [*project["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    pattern = r"([\w-]+)(?:\[.*?\])?(?:>=([\d.]+))?[^;]*(;.*)?"
    parsed = [(requirement, *re.fullmatch(pattern, requirement).groups()) for requirement in requirements]
    bounded = {name for _, name, bound, _ in parsed if bound} | {project["name"]}
    for requirement, name, _, _ in parsed:
        if name not in bounded:
            fail(f"pyproject.toml: {requirement!r} needs a lower bound, such as {name}>=1.0.")
    return [f"{name}=={bound}{marker or ''}" for _, name, bound, marker in parsed if bound]


def stamp_path(environment, extra):
    """The file that is written when an installation is complete. It holds the fingerprint."""
    return os.path.join(environment, f"installed-{extra or 'base'}.txt")


def is_installed(root, environment, extra):
    """True if the environment is complete, with this extra or all, for this state of the project."""
    if not os.path.exists(venv_python(environment)):
        return False
    for installed in {extra, ALL_EXTRAS}:
        try:
            with open(stamp_path(environment, installed), encoding="utf-8") as file:
                if file.read().strip() == fingerprint(root, installed):
                    return True
        except OSError:
            continue
    return False


def has_pip(environment):
    """True if the environment exists and was completely created."""
    try:
        check = [venv_python(environment), "-m", "pip", "--version"]
        return subprocess.run(check, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def install_commands(root, environment, extra, versions):
    """The commands that set up the environment, in order, each with its name.

    torch is installed first: with the project, pip could choose another build within the declared range.
    """
    pip = [venv_python(environment), "-m", "pip", "install", "--disable-pip-version-check"]
    project = root + (f"[{extra}]" if extra else "")
    torch = [version for version in versions if version.startswith("torch==")]
    others = [version for version in versions if version not in torch]
    commands = [
        ("Installing torch", [*pip, *torch]),
        ("Installing the project", [*pip, "--editable", project, *others]),
    ]
    if not has_pip(environment):
        commands.insert(0, ("Creating the environment", [sys.executable, "-m", "venv", environment]))
    return commands


def job_command(environment, job, arguments):
    """The command that runs the job."""
    if job == "train":
        name = "hf-recurrent.exe" if os.name == "nt" else "hf-recurrent"
        return [os.path.join(os.path.dirname(venv_python(environment)), name), "pretrain", *arguments]
    # The tests of one file share a process: some share runs that take long. tests/conftest.py orders the files.
    parallel = ["-n", "logical", "--dist", "loadfile", "--no-loadscope-reorder"]
    pytest = [venv_python(environment), "-m", "pytest", *parallel]
    if job == "test" and "--smoke" in arguments:
        arguments = ["@tests/smoke.txt", *(argument for argument in arguments if argument != "--smoke")]
    if job == "test-oldest":
        arguments = arguments or ["@tests/oldest.txt"]
    return [*pytest, *arguments]


def show(command):
    """Print a command as it would be typed."""
    print("+ " + shlex.join(command), flush=True)


def install(root, environment, extra, versions):
    """Run the installation and write its stamp; exit with the name of the first step that fails."""
    for name, command in install_commands(root, environment, extra, versions):
        show(command)
        try:
            status = subprocess.run(command, check=False).returncode
        except OSError as error:
            fail(f"{name} failed to start: {error}.")
        if status:
            hint = " On Debian and Ubuntu, install python3-venv first." if "venv" in command else ""
            fail(f"{name} failed with status {status}; see the output above.{hint} Rerun this command to continue.")
    with open(stamp_path(environment, extra), "w", encoding="utf-8") as file:
        file.write(fingerprint(root, extra) + "\n")


def main(arguments):
    """Install if necessary, then replace this process by the job."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        fail(f"Python {oldest} or newer is required; this is {sys.version.split()[0]}.")
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    only_print = arguments[:1] == ["--print"]
    job, *rest = arguments[only_print:] or [""]
    if job not in EXTRAS:
        fail(f"unknown command {job!r} (choose from {', '.join(EXTRAS)}).\n{USAGE}")
    extra, oldest = EXTRAS[job], job == "test-oldest"
    environment = os.path.join(ROOT, ".venv-oldest" if oldest else ".venv")
    versions = oldest_requirements(ROOT) if oldest else [TORCH]
    command = job_command(environment, job, rest)
    installed = is_installed(ROOT, environment, extra)
    if only_print:
        steps = [] if installed else [step for _, step in install_commands(ROOT, environment, extra, versions)]
        for line in [*steps, command]:
            show(line)
        return 0
    if not installed:
        install(ROOT, environment, extra, versions)
    show(command)
    if job != "train":
        os.chdir(ROOT)
    if os.name == "nt":
        return subprocess.run(command, check=False).returncode
    os.execv(command[0], command)  # signals, such as Ctrl-C, reach the job directly


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
