"""fulmen.explain: what a program becomes, who runs each node and why, what stays with PyTorch."""

import contextlib
import html
import json
import os
import sys

from fulmen import _core
from fulmen._claims import answer_dict
from fulmen._core import TypeError


# Colours by name, so that the page follows the reader's light or dark setting; tables and code scroll by themselves.
_style = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#667;--paper:#fff;--rule:#d9dde3;--panel:#f5f6f8;--ours:#c0392b;--other:#2c6fbb}
@media(prefers-color-scheme:dark){:root{--ink:#e3e6ea;--soft:#9aa3ad;--paper:#16191d;--rule:#343a42;--panel:#1f242a;--ours:#ff7b6b;--other:#6cb0ff}}
body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:var(--ink);background:var(--paper)}
h1{font-size:1.6em}h2{font-size:1.2em;margin-top:2em}small{color:var(--soft)}
.wide{overflow-x:auto;margin:.8em 0}table{border-collapse:collapse;font-size:14px}
td,th{border-bottom:1px solid var(--rule);padding:.3em .9em .3em 0;text-align:left;vertical-align:top}th{color:var(--soft);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
pre{overflow-x:auto;background:var(--panel);padding:1em;font-size:12.5px;line-height:1.45;border-radius:6px}
summary{cursor:pointer;padding:.25em 0}svg text{fill:var(--soft)}
.bar{display:inline-block;height:.7em;background:var(--other);border-radius:2px;min-width:2px}.bar.ours{background:var(--ours)}
""".replace("\n", "")


def _table(header, rows):
    """A table that scrolls by itself; columns of numbers stand right."""

    def is_number(text):
        return text.replace(",", "").replace(".", "").rstrip("x").isdigit()

    rows = [[str(cell) for cell in row] for row in rows]
    right = [bool(rows) and all(is_number(row[i]) for row in rows) for i in range(len(header))]

    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}{' class=n' if n else ''}>{html.escape(cell)}</{tag}>" for cell, n in zip(cells, right)) + "</tr>"

    return f"<div class=wide><table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table></div>"


class Explanation:
    """`claims`: one record a node (node, op, executor, kernel, direction, refusals). `coverage`: nodes run by Fulmen over
    all nodes. `fallbacks`: what stayed with PyTorch, (node, call, reason) each. `traces`: stage -> text. `saved_bytes`:
    kept from forward to backward. `arena_bytes`: memory beside inputs and results, known before it runs."""

    def __init__(self, name, parts, fallbacks, node_count, breaks=()):
        self.name, self.fallbacks, self.breaks = name, list(fallbacks), list(breaks)
        self.node_count = node_count
        self.coverage = 1.0 - len(self.fallbacks) / node_count if node_count else 1.0
        self.claims, self.traces = [], {}
        self.stage_ms, self.saved_bytes, self.arena_bytes = {}, 0, 0
        for index, (trace, compiled) in enumerate(parts):
            prefix = f"graph {index}: " if len(parts) > 1 else ""
            self.claims += compiled.claims
            self.saved_bytes += compiled.saved_bytes
            self.arena_bytes = max(self.arena_bytes, compiled.arena_bytes)
            self.traces[prefix + "acquire"] = str(trace)
            for stage in compiled.stages:
                self.traces[prefix + stage.name] = stage.text
                self.stage_ms[prefix + stage.name] = stage.ms

    def by_executor(self):
        """(executor, op, direction) -> how many nodes; views and decomposed nodes are left out."""
        counts = {}
        for claim in self.claims:
            if claim.executor and claim.executor != "view":
                key = (claim.executor, claim.op, claim.direction)
                counts[key] = counts.get(key, 0) + 1
        return dict(sorted(counts.items()))

    def refusals(self):
        """(executor, op, code, reason) -> how often, without the plain "doesn't run this op"."""
        counts = {}
        for claim in self.claims:
            for refusal in claim.refusals:
                if refusal.code not in ("not_implemented", "unavailable"):
                    key = (refusal.executor, claim.op, refusal.code, refusal.reason)
                    counts[key] = counts.get(key, 0) + 1
        return counts

    def to_dict(self):
        return {
            "name": self.name,
            "coverage": self.coverage,
            "node_count": self.node_count,
            "saved_bytes": self.saved_bytes,
            "arena_bytes": self.arena_bytes,
            "claims": [
                {
                    "node": c.node,
                    "op": c.op,
                    "executor": c.executor,
                    "kernel": c.kernel,
                    "direction": c.direction,
                    "refusals": [{k: v for k, v in answer_dict(r).items() if k in ("executor", "code", "reason")} for r in c.refusals],
                }
                for c in self.claims
            ],
            "fallbacks": [{"node": n, "call": c, "reason": r} for n, c, r in self.fallbacks],
            "graph_breaks": self.breaks,
            "traces": self.traces,
            "stage_ms": self.stage_ms,
        }

    def to_json(self, indent=None):
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self):
        lines = [
            f"{self.name}: {self.node_count} nodes, coverage {self.coverage:.3f}; "
            f"{self.saved_bytes:,} bytes saved for the backward, {self.arena_bytes:,} bytes of working memory"
        ]
        counts = self.by_executor()
        if counts:
            lines.append("who runs what:")
            width = max(len(op) for _, op, _ in counts)
            lines += [f"  {e:<10} {op:<{width}} {direction:<17} x{n}" for (e, op, direction), n in counts.items()]
        refused = self.refusals()
        if refused:
            lines.append("refusals:")
            lines += [f"  {e:<10} {op}: {reason} [{code}] x{n}" for (e, op, code, reason), n in refused.items()]
        lines.append("stays with PyTorch: " + ("nothing" if not self.fallbacks else ""))
        lines += [f"  {call} in {node}: {reason}" for node, call, reason in self.fallbacks]
        lines += [f"  graph break: {reason}" for reason in self.breaks]
        last = [name for name in self.traces if name.endswith("program: forward")]
        if last:
            lines += ["the program:", *("  " + line for line in self.traces[last[0]].splitlines())]
        return "\n".join(lines)

    def __repr__(self):
        return f"<fulmen.Explanation {self.name}: coverage {self.coverage:.3f}, {len(self.claims)} claims, {len(self.fallbacks)} fallbacks>"

    def to_html(self, top=""):
        """One page with nothing from outside. `top`: HTML that stands before the rest."""
        counted = [(*key, n) for key, n in self.by_executor().items()]
        refused = [(*key, n) for key, n in self.refusals().items()]
        breaks = "".join(f"<p>graph break: {html.escape(reason)}</p>" for reason in self.breaks)
        parts = [
            top or f"<h1>{html.escape(self.name)}</h1>",
            "<h2>Who runs what</h2>",
            f"<p>{self.node_count} nodes of {html.escape(self.name)}, coverage {self.coverage:.3f}. {self.saved_bytes:,} bytes are saved for the "
            f"backward, {self.arena_bytes:,} bytes of working memory are planned.</p>",
            _table(("executor", "op", "direction", "nodes"), counted),
            "<h2>Refusals</h2>",
            "<p>What an executor that was asked earlier answered. An op that it doesn't have at all is left out.</p>",
            _table(("executor", "op", "code", "reason", "times"), refused) if refused else "<p>none</p>",
            "<h2>Stays with PyTorch</h2>",
            _table(("node", "call", "reason"), self.fallbacks) if self.fallbacks else "<p>nothing</p>",
            breaks,
            "<h2>The trace after each stage</h2>",
        ]
        for name, text in self.traces.items():
            ms = f" <small>{self.stage_ms[name]:.2f} ms, {len(text.splitlines())} lines</small>" if name in self.stage_ms else ""
            parts.append(f"<details><summary>{html.escape(name)}{ms}</summary><pre>{html.escape(text)}</pre></details>")
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>fulmen: {html.escape(self.name)}</title><style>{_style}</style></head><body>{''.join(parts)}</body></html>"
        )

    def save_html(self, path):
        """Written beside an old file first, which a full disk then leaves as it was."""
        beside = f"{path}.part"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(self.to_html())
            os.replace(beside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise OSError(error.errno, error.strerror, str(path)) from None


def explain(fn_or_module, *args, _executors=None, **kwargs):
    """Compiles `fn_or_module` for these arguments and tells what became of it. A torch module or function is acquired
    through Dynamo (its program runs once, in training if a parameter or argument wants a gradient); a function over
    arrays, or one of fulmen.jit, fulmen.grad, by calling it."""
    from fulmen._arrays import TracedFunction, flatten
    from fulmen._executors import resolve
    from fulmen._jit import made_of

    torch = sys.modules.get("torch")
    form = getattr(fn_or_module, "array_form", None)
    traced = getattr(form or fn_or_module, "traced", form or fn_or_module)
    is_torch = torch is not None and (
        isinstance(fn_or_module, torch.nn.Module) or any(isinstance(x, torch.Tensor) for x in flatten((args, kwargs))[0])
    )
    inner, executors, autocast = made_of(fn_or_module)  # fulmen.jit's executors and autocast hold here too
    executors = resolve(executors) if _executors is None else _executors
    if is_torch and not isinstance(traced, TracedFunction):
        from fulmen._explain_torch import explain_torch

        return explain_torch(inner, args, kwargs, executors, autocast)
    if not isinstance(traced, TracedFunction):
        if not callable(inner):
            raise TypeError(f"explain: a function or a torch.nn.Module is needed, found {type(inner).__name__}")
        if hasattr(inner, "traced"):  # fulmen.jit of fulmen.grad
            return explain(inner, *args, _executors=_executors, **kwargs)
        traced = TracedFunction(inner, executors, autocast=autocast)
    traced(*args, **kwargs)
    trace = traced.last.trace
    compiled = _core.compile(trace, traced.executors if _executors is None else _executors, training=traced.wanted is not None, keep_texts=True)
    return Explanation(traced.__name__, [(trace, compiled)], [], trace.node_count)
