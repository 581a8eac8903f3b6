"""The examples of README.md and docs/*.md run as they stand.

The ```python blocks of a page run in order in one process, except those marked ```python no-run. A block marked
```text output is what the python block before it prints. In a ```console block each line "$ fulmen ..." is run and its
output compared with the lines below it; a target that needs cuDNN is compared only where cuDNN can be asked. In expected
output a line "..." stands for lines left out, "..." inside a line for a part of it. Links must lead somewhere.
"""

import contextlib
import importlib.util
import io
import json
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

# Runs the blocks that it reads and writes what each printed.
_runner = """
import contextlib, io, json, sys
blocks, space = json.load(sys.stdin), {"__name__": "__main__"}
printed = []
for line, source in blocks:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\\n" * line + source, "page", "exec"), space)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def name_of(page):
    return str(page.relative_to(root))


def blocks_of(page):
    """(line, language, the words behind it, text) of each fenced block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start()) + 1, m[1], m[2].split(), m[3]) for m in _fence.finditer(text)]


def run_blocks(sources, folder):
    place = os.path.dirname(os.path.dirname(os.path.abspath(fulmen.__file__)))
    path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _runner], input=json.dumps(sources), cwd=folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def matches(found, expected):
    """Whether the lines are those expected, spaces at ends aside."""
    pattern = ""
    for line in expected:
        inside = ".*".join(re.escape(part) for part in line.rstrip().split("..."))
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else inside + r"\n"
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in found)) is not None


@pytest.mark.parametrize("page", [p for p in pages if any(b[1] == "python" for b in blocks_of(p))], ids=name_of)
def test_python_blocks_run(page, tmp_path):
    pytest.importorskip("torch")
    sources, expected = [], []
    for line, language, words, text in blocks_of(page):
        if language == "python" and "no-run" not in words:
            sources.append((line, text))
        elif language == "text" and "output" in words:
            expected.append((line, len(sources) - 1, text.rstrip().splitlines()))
    printed = run_blocks(sources, tmp_path)
    for line, at, lines in expected:
        assert matches(printed[at].rstrip().splitlines(), lines), f"{name_of(page)}:{line} is not what is printed:\n{printed[at]}"


def console_examples():
    for page in pages:
        for line, language, words, text in blocks_of(page):
            if language == "console" and "no-run" not in words:
                for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                    command, _, output = part.partition("\n")
                    yield pytest.param(command, output.rstrip().splitlines(), id=f"{name_of(page)}:{line}")


def needs_cudnn(words):
    return "--target" in words and words[words.index("--target") + 1] != "cpu"


@pytest.mark.parametrize("command, expected", list(console_examples()))
def test_console_example_prints_this(command, expected):
    words = shlex.split(command)
    assert words[0] == "fulmen"
    if needs_cudnn(words):
        spec = "bf16[2,8,128,64]"
        answer = fulmen.claims("sdpa", q=spec, k=spec, v=spec, target="h200")["cudnn"]
        if not answer.claimed:
            pytest.skip(f"cuDNN can't be asked here: {answer.reason}")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        cli.main(words[1:])
    assert matches(output.getvalue().rstrip().splitlines(), expected), f"$ {command}\n{output.getvalue()}"


def test_matching_is_strict():
    assert matches(["a", "b", "c"], ["a", "...", "c"])
    assert matches(["a (b, c) d"], ["a (...) d"])
    assert not matches(["a", "b", "c"], ["a", "c"])
    assert not matches(["a", "b"], ["a", "b", "c"])
    assert not matches(["a (b, c) e"], ["a (...) d"])


def test_a_wrong_block_is_found(tmp_path):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_blocks([(1, "x = 1\n"), (4, "x / 0\n")], tmp_path)


@pytest.mark.parametrize("page", pages, ids=name_of)
def test_links_lead_somewhere(page):
    text = _fence.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which isn't there"


def test_op_page_is_made_from_the_catalogue():
    spec = importlib.util.spec_from_file_location("make_op_docs", root / "tools" / "make_op_docs.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.path.read_text(encoding="utf-8") == tool.page(), "run tools/make_op_docs.py"


def test_every_reason_code_is_documented():
    from fulmen import _core

    text = (root / "docs" / "claims.md").read_text(encoding="utf-8")
    section = text.partition("## Reason codes")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE) == list(_core.refusal_codes())


def test_every_public_name_is_documented():
    text = (root / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in fulmen.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"docs/api.md doesn't mention {', '.join(missing)}"
