"""The house style as a test: sizes, docstrings and layers.

There is no list of exemptions: what does not fit is changed, or the rule is.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
FOLDER_FILES_MAX = 25
ROOMY = ("fpfs", "native", "tests", "benchmarks")
TEXT_SUFFIXES = (".py", ".cc", ".h", ".cmake", ".toml", ".service")
PUBLIC_PACKAGES = ("fpfs", "benchmarks")


def tracked_files() -> list[Path]:
    """Files of the repository that exist, as git lists them; new ones not yet added included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listed.splitlines() if (path := REPOSITORY / name).is_file()]


FILES = [path for path in tracked_files() if path.suffix in TEXT_SUFFIXES]
PYTHON = [path for path in FILES if path.suffix == ".py"]
PUBLIC = [path for path in PYTHON if path.relative_to(REPOSITORY).parts[0] in PUBLIC_PACKAGES]
NATIVE = [path for path in FILES if path.suffix in (".cc", ".h")]


def name(path: Path) -> str:
    """A path as it reads in a report."""
    return str(path.relative_to(REPOSITORY))


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) > 20
    assert len(NATIVE) > 5


def check(rule: Callable[[Path], Iterator[str]], paths: Sequence[Path]) -> None:
    """Hold every file to a rule, which yields what does not fit; all of that is told at once."""
    faults = [f"{name(path)}: {fault}" for path in paths for fault in rule(path)]
    assert not faults, "\n" + "\n".join(faults)


def test_sizes() -> None:
    def rule(path: Path) -> Iterator[str]:
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES_MAX:
            yield f"{len(lines)} lines"
        for number, line in enumerate(lines, 1):
            if len(line) > COLUMNS_MAX:
                yield f"line {number} is longer than {COLUMNS_MAX} columns"
            if line != line.rstrip():
                yield f"line {number} ends in blanks"

    check(rule, FILES)


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    folders = collections.Counter(
        path.parent for path in (*PYTHON, *NATIVE) if path.relative_to(REPOSITORY).parts[0] in ROOMY
    )
    crowded = {name(path): count for path, count in folders.items() if count > FOLDER_FILES_MAX}
    assert not crowded, "make packages of what belongs together"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a module, inner ones and methods included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short_and_modules_say_what_they_are_for() -> None:
    def rule(path: Path) -> Iterator[str]:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            yield "the module has no docstring"
        for function in functions(tree):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{function.name} has {length} lines"

    check(rule, PYTHON)


def is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether this is only a signature, whose docstring is at the implementation."""
    return any(isinstance(it, ast.Name) and it.id == "overload" for it in function.decorator_list)


def undocumented(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Public classes and functions of a module or class without a docstring."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_") and child.name != "__init__":
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and is_overload(child):
            continue
        if not ast.get_docstring(child) and child.name != "__init__":
            yield prefix + child.name
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child, prefix + child.name + ".")


def test_public_things_are_documented() -> None:
    def rule(path: Path) -> Iterator[str]:
        for thing in undocumented(ast.parse(path.read_text())):
            yield f"{thing} has no docstring"

    check(rule, PUBLIC)


def test_native_files_open_with_their_purpose() -> None:
    def rule(path: Path) -> Iterator[str]:
        lines = path.read_text().splitlines()
        header = f'#include "{path.parent.name}/{path.stem}.h"'
        own_header = path.suffix == ".cc" and lines[0] in (header, f'#include "{path.stem}.h"')
        if not lines[0].startswith("// ") and not own_header:
            yield "neither a purpose nor the header that has it"
        if path.suffix == ".h" and "#pragma once" not in lines:
            yield "no #pragma once"

    check(rule, NATIVE)


NATIVE_ROOMS = {
    "base": set[str](),
    "layout": {"base"},
    "device": {"base", "layout"},
    "staging": {"base", "layout"},
    "file": {"base", "layout", "device", "staging"},
    "engine": {"base", "layout", "device", "staging", "file"},
    "fuse": {"base", "layout", "device", "staging", "file", "engine"},
    "catalog": {"base"},
    "client": {"base"},
}
"""The folders of native/src, and what each may include beside its own files."""


def test_includes_go_downward_only() -> None:
    root = REPOSITORY / "native" / "src"

    def rule(path: Path) -> Iterator[str]:
        room = path.relative_to(root).parts[0]
        for mark, included in re.findall(r'#\s*include\s*([<"])([^">]+)', path.read_text()):
            above = included.partition("/")[0]
            is_ours = mark == '"' or above in NATIVE_ROOMS
            if is_ours and above not in NATIVE_ROOMS[room] | {room}:
                yield f"{room} does not know {included}"

    rooms = [path for path in NATIVE if path.is_relative_to(root)]
    assert {path.relative_to(root).parts[0] for path in rooms} == NATIVE_ROOMS.keys()
    check(rule, rooms)


def test_native_functions_are_short() -> None:
    """clang-format puts the closing brace of a function at its own column."""

    def rule(path: Path) -> Iterator[str]:
        for number, length in native_blocks(path.read_text().splitlines()):
            if length > FUNCTION_LINES_MAX:
                yield f"the function at line {number} has {length} lines"

    check(rule, NATIVE)


def native_blocks(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Line and length of the function bodies at namespace scope, and of inline methods."""
    for start, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        opens = re.search(r"\)[^;()]*\{$", line) and indent in (0, 2) and "=" not in line
        if not opens or line.lstrip().startswith(("if", "for", "while", "switch", "}")):
            continue
        closing = " " * indent + "}"
        for end in range(start + 1, len(lines)):
            if lines[end].startswith(closing) and not lines[end][indent + 1 :].startswith(" else"):
                yield start + 1, end - start + 1
                break


def test_long_functions_are_found() -> None:
    body = ["  x();"] * FUNCTION_LINES_MAX
    assert [length for _, length in native_blocks(["void f(int a) {", *body, "}"])] == [72]


def test_the_layers_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_and_daemon_work_without_torch() -> None:
    code = (
        "import sys; import fpfs.cli.main, fpfs.cli.ctl, fpfs.daemon.mount.main;"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_what_commands_use_of_the_client_works_without_torch() -> None:
    code = (
        "import sys; import fpfs.client.plan, fpfs.client.shares.gathering;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_only_the_engine_modules_import_the_extension() -> None:
    found = [
        name(path)
        for path in PUBLIC
        if re.search(r"^\s*(from|import) .*\b_native\b", path.read_text(), re.MULTILINE)
    ]
    assert sorted(found) == [
        "fpfs/core/engine.py",
        "fpfs/core/native_engine.py",
        "fpfs/core/transfers.py",
    ]


def test_the_stub_fits_the_extension(tmp_path: Path) -> None:
    """`make stubs` writes it anew."""
    found = tmp_path / "_native.pyi"
    tools = Path(sys.executable).parent
    for command in (
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "fpfs._native", "-o", found],
        [tools / "ruff", "format", "--quiet", "--config", REPOSITORY / "pyproject.toml", found],
    ):
        subprocess.run(command, check=True, capture_output=True)
    assert found.read_text() == (REPOSITORY / "fpfs" / "_native.pyi").read_text()


def test_the_package_says_that_it_is_typed() -> None:
    """PEP 561: without this file type checkers read no annotation, nor the extension's stub."""
    assert (REPOSITORY / "fpfs" / "py.typed").is_file()


def test_versions_are_pinned() -> None:
    """Every dependency that pyproject.toml names has its tested version in constraints.txt."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.split(r"[\[<>=~! ]", line)[0] for line in wanted} - {"fpfs"}
    pinned = re.findall(r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert names - set(pinned) == set()
    assert "torch==2.13.0" in (REPOSITORY / "constraints.txt").read_text()
