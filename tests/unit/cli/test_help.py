"""Help, the reference page, schemas and completion: as they are kept, and true."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cyclopts import App

from fpfs.cli import ctl, main, schemas
from fpfs.cli.completion import Shell, script_of
from fpfs.cli.examples import EXAMPLES, commands_of, lay_out
from tests.support import golden
from tests.support.processes import REPOSITORY, run
from tests.support.terminal import running_program

PAGE = REPOSITORY / "docs" / "fpfs-ctl.md"
MARK = "<!-- What follows is the help of each command, written by make golden. -->\n"
APPS = {"fpfs": main.app, "fpfs-ctl": ctl.app}
COMMANDS: dict[str, App] = {name: app for top in APPS.values() for name, app in commands_of(top)}
COLUMNS = 80


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What --help prints, without blanks at the ends of lines."""
    tool, *words = command.split()
    run = {"fpfs": main.main, "fpfs-ctl": ctl.main}[tool]
    assert run([*words, "--help"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return "".join(f"{line.rstrip()}\n" for line in said.out.rstrip().splitlines())


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_as_it_is_kept(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    golden.check(f"help/{command.replace(' ', '-')}.txt", text)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert all(f"  {line}\n" in text for line in EXAMPLES.get(command, ()))


def test_no_help_is_kept_of_what_is_gone() -> None:
    kept = {path.stem for path in (golden.FOLDER / "help").iterdir()}
    assert kept == {command.replace(" ", "-") for command in COMMANDS}


def test_each_command_has_examples_that_it_can_read() -> None:
    assert set(EXAMPLES) == set(COMMANDS) - set(APPS)
    for command, lines in EXAMPLES.items():
        assert lines, command
        for line in lines:
            tool, *words = shlex.split(line.partition(" > ")[0])
            assert f"{line} ".startswith(f"{command} ")
            APPS[tool].parse_args(words, exit_on_error=False, print_error=False)


def test_the_reference_page_has_the_help_of_all_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = PAGE.read_text().partition(MARK)[0]
    parts = [
        f"\n## {command}\n\n```text\n{help_of(command, capsys)}```\n"
        for command in sorted(COMMANDS)
        if command not in APPS
    ]
    golden.check(PAGE.name, head + MARK + "".join(parts), folder=PAGE.parent)


def test_each_option_of_the_page_s_head_is_one() -> None:
    """What people have written is about what there is."""
    head = PAGE.read_text().partition(MARK)[0]
    named = set(re.findall(r"`(fpfs(?:-ctl)? [a-z]+(?: [a-z]+)?)", head))
    assert named
    for words in named:
        assert words in COMMANDS or words.rsplit(maxsplit=1)[0] in COMMANDS, words


def has_json(app: App) -> bool:
    """Whether a command takes --json."""
    function = app.default_command
    return function is not None and "json" in function.__annotations__


def test_each_command_that_prints_json_has_a_schema() -> None:
    taking = {
        command.removeprefix("fpfs-ctl ")
        for command, app in COMMANDS.items()
        if command.startswith("fpfs-ctl ") and has_json(app)
    }
    assert taking == set(schemas.PRINTED)
    others = {
        command
        for command, app in COMMANDS.items()
        if command.startswith("fpfs-ctl ") and app.default_command and not has_json(app)
    }
    # These print another format, or to a terminal only.
    assert others == {
        "fpfs-ctl completion",
        "fpfs-ctl policy export",
        "fpfs-ctl top",
        "fpfs-ctl trace",
    }


@pytest.mark.parametrize("command", schemas.PRINTED)
def test_the_schema_is_as_it_is_documented(command: str) -> None:
    folder = REPOSITORY / "docs" / "json"
    text = schemas.schema_of(command) + "\n"
    golden.check(schemas.file_of(command), text, folder=folder)
    assert msgspec.json.decode(text)["$schema"] == schemas.DIALECT


def test_no_schema_is_kept_of_what_is_gone() -> None:
    kept = {path.name for path in (REPOSITORY / "docs" / "json").iterdir()}
    assert kept == {schemas.file_of(command) for command in schemas.PRINTED}


@pytest.mark.parametrize("shell", Shell)
def test_a_shell_can_read_its_script(shell: Shell, tmp_path: Path) -> None:
    program = shutil.which(shell.value)
    if program is None:
        pytest.skip(f"{shell.value} is not installed (mount_scripts/install_packages test)")
    path = tmp_path / "script"
    path.write_text(script_of("both", shell))
    done = subprocess.run([program, "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


BASH = """
source "$1"
words=(${2})
COMP_WORDS=("${words[@]}")
[ "${2: -1}" = " " ] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMP_LINE=$2
COMP_POINT=${#2}
function=$(complete -p "${words[0]}" | sed -E 's/.*-F ([^ ]+) .*/\\1/')
"$function" "${words[0]}" "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """
complete -C "$argv[2]" | string split -f 1 \\t
"""


LINES = pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fpfs-ctl st", {"stat", "status"}),
        ("fpfs-ctl policy un", {"unset"}),
        ("fpfs-ctl wait --ti", {"--timeout"}),
        ("fpfs-ctl completion ", {"bash", "fish", "zsh"}),
        ("fpfs um", {"umount"}),
    ],
)


@LINES
@pytest.mark.parametrize("shell", [Shell.BASH, Shell.FISH])
def test_a_real_shell_completes(shell: Shell, line: str, offered: set[str], tmp_path: Path) -> None:
    program = shutil.which(shell.value)
    if program is None:
        pytest.skip(f"{shell.value} is not installed (mount_scripts/install_packages test)")
    path = tmp_path / "script"
    path.write_text(script_of("both", shell))
    if shell is Shell.BASH:
        command = [program, "--norc", "-c", BASH, "bash", str(path), line]
    else:
        command = [program, "--no-config", "-c", f"source {path}\n{FISH}", "x", line]
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert offered <= set(done.stdout.split()), done.stdout


@LINES
@pytest.mark.parametrize("how", ["installed", "sourced"])
def test_zsh_completes_what_is_typed(
    how: str, line: str, offered: set[str], tmp_path: Path
) -> None:
    """An interactive zsh: it makes its list for its line editor only."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed (mount_scripts/install_packages test)")
    begin = "PS1=; autoload -Uz compinit; compinit -D -u; bindkey '^I' list-choices"
    if how == "installed":
        for tool in APPS:
            (tmp_path / f"_{tool}").write_text(script_of(tool, Shell.ZSH))
        begin = f"fpath=({tmp_path} $fpath); {begin}"
    else:
        (tmp_path / "script").write_text(script_of("both", Shell.ZSH))
        begin = f"{begin}; source {tmp_path}/script"
    with running_program("zsh", "-f", "-i") as shell:
        shell.type(f"{begin}; print prepa''red\n")
        shell.read_until("prepared")
        shell.type(f"{line}\t")
        for word in offered:
            shell.read_until(word)


def test_completion_is_installed_where_shells_look(tmp_path: Path) -> None:
    script = REPOSITORY / "mount_scripts" / "install_completion"
    venv = Path(sys.executable).parents[1]
    run(script, venv, tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {
        *(f"bash-completion/completions/{tool}" for tool in APPS),
        *(f"zsh/vendor-completions/_{tool}" for tool in APPS),
        *(f"fish/vendor_completions.d/{tool}.fish" for tool in APPS),
    }
    for tool in APPS:
        kept = (tmp_path / "zsh" / "vendor-completions" / f"_{tool}").read_text()
        assert kept.startswith(f"#compdef {tool}\n")


def test_laying_help_out_twice_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    first = help_of("fpfs-ctl policy", capsys)
    lay_out(ctl.app)
    assert help_of("fpfs-ctl policy", capsys) == first
