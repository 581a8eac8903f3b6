"""Writes docs/ops.md from the op catalogue, through the Python extension.

    python tools/make_op_docs.py           # writes docs/ops.md
    python tools/make_op_docs.py --check   # exit code 1 if docs/ops.md isn't what it would write

tests/python/test_docs.py runs the check, so a changed op comes with its documentation.
"""

import pathlib
import sys

from fulmen import _core

path = pathlib.Path(__file__).resolve().parents[1] / "docs" / "ops.md"

head = """# The op catalogue

Made from the entries in `src/ops` by `tools/make_op_docs.py`; edit the entries, not this page.

{count} ops. A *primitive* is run by executors as it is; a *composite* is claimed whole or replaced by its decomposition.
*Differentiable* says whether an operand can get a gradient. In Python the ops are `fulmen.ops.NAME`, operands first, then
attributes; in C++ `fulmen::call("NAME", operands, attributes)`. Operands in brackets are optional; `...` takes any number.
The last line of an entry names the PyTorch callables that are recorded as this op. Ops whose names end in `_grad`,
`_forward` and `_backward` are written by gradient rules and by claims.
"""


def shown(value):
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, (tuple, list)) else value)


def entry_text(entry):
    operands = ", ".join({"required": "{}", "optional": "[{}]", "variadic": "{}..."}[need].format(name) for name, need in entry["operands"])
    kind = "primitive" if entry["primitive"] else "composite"
    lines = [f"### {entry['name']}", "", f"`{entry['name']}({operands})`, {kind}, {'differentiable' if entry['differentiable'] else 'not differentiable'}", ""]
    lines += [entry["doc"].replace("\n", "\n\n").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_"), ""]
    if entry["attributes"]:
        lines += ["| attribute | kind | default |", "|---|---|---|"]
        for name, kind, has_default, default in entry["attributes"]:
            lines.append(f"| {name} | {kind} | {shown(default) if has_default else 'required'} |")
        lines.append("")
    if entry["torch"]:
        lines += ["PyTorch: " + ", ".join(f"`{name}`" for name in entry["torch"]), ""]
    return "\n".join(lines)


def page():
    entries = sorted(_core.ops(), key=lambda entry: entry["name"])
    index = ", ".join(f"[{e['name']}](#{e['name']})" for e in entries)
    return head.format(count=len(entries)) + "\n" + index + "\n\n" + "\n".join(map(entry_text, entries))


def main(arguments):
    text = page()
    if "--check" in arguments:
        if path.read_text(encoding="utf-8") != text:
            print(f"{path} is not what tools/make_op_docs.py writes; run it", file=sys.stderr)
            return 1
        return 0
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
