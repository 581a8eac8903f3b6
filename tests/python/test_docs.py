"""The examples of README.md and docs/*.md run as they stand.

A ```python block is run in a process of its own; one that can't be run alone is marked ```python no-run. In a ```console
block each line "$ fulmen ..." is run and its output compared with the lines below it ("..." stands for lines left out);
a target that needs cuDNN is compared only where cuDNN can be asked. Links between the pages must lead somewhere.
"""

import contextlib
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import fulmen
from fulmen import cli

root = pathlib.Path(__file__).resolve().parents[2]
pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
_fence = re.compile(r"^```([a-z]+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in _fence.finditer(text):
            if match[1] == language and "no-run" not in match[2]:
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(match[3], id=f"{page.relative_to(root)}:{line}")


def commands():
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.values[0], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield pytest.param(command, output.rstrip().splitlines(), id=block.id)


def asks_cudnn(words):
    return "--target" in words and words[words.index("--target") + 1] not in ("cpu",)


@pytest.mark.parametrize("source", list(blocks("python")))
def test_python_block_runs(source, tmp_path):
    pytest.importorskip("torch")
    folder = os.path.dirname(os.path.dirname(os.path.abspath(fulmen.__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command, expected", list(commands()))
def test_console_example_prints_this(command, expected):
    words = shlex.split(command)
    assert words[0] == "fulmen"
    if asks_cudnn(words):
        # A described target needs the library, not the device.
        answer = fulmen.claims("sdpa", q="bf16[2,8,128,64]", k="bf16[2,8,128,64]", v="bf16[2,8,128,64]", target="h200")["cudnn"]
        if not answer.claimed:
            pytest.skip(f"cuDNN can't be asked here: {answer.reason}")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        cli.main(words[1:])
    assert matches(output.getvalue().rstrip().splitlines(), expected), f"$ {command}\n{output.getvalue()}"


def matches(found, expected):
    """Line by line, spaces at ends aside; "..." in the expected lines is any number of lines."""
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + "\n" for line in expected)
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in found)) is not None


def test_matches_is_strict():
    assert matches(["a", "b", "c"], ["a", "...", "c"])
    assert not matches(["a", "b", "c"], ["a", "c"])
    assert not matches(["a", "b"], ["a", "b", "c"])


@pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(root)))
def test_links_lead_somewhere(page):
    text = _fence.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which isn't there"
