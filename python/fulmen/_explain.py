"""fulmen.explain: what a program becomes, who runs each node and why, what stays with PyTorch."""

import html
import json
import sys

from fulmen import _core
from fulmen._claims import answer_dict
from fulmen._core import TypeError


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

    def to_html(self):
        def table(header, rows):
            cells = "".join(f"<th>{html.escape(h)}</th>" for h in header)
            body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
            return f"<table><tr>{cells}</tr>{body}</table>"

        parts = [
            f"<h1>{html.escape(self.name)}</h1><p>{self.node_count} nodes, coverage {self.coverage:.3f}, "
            f"{self.saved_bytes:,} bytes saved for the backward, {self.arena_bytes:,} bytes of working memory</p>",
            "<h2>Who runs what</h2>",
            table(("executor", "op", "direction", "nodes"), [(*k, n) for k, n in self.by_executor().items()]),
            "<h2>Refusals</h2>",
            table(("executor", "op", "code", "reason", "times"), [(*k, n) for k, n in self.refusals().items()]),
            "<h2>Stays with PyTorch</h2>",
            table(("node", "call", "reason"), self.fallbacks) if self.fallbacks else "<p>nothing</p>",
            "<h2>The trace after each stage</h2>",
        ]
        for name, text in self.traces.items():
            ms = f" ({self.stage_ms[name]:.2f} ms)" if name in self.stage_ms else ""
            parts.append(f"<details><summary>{html.escape(name)}{ms}</summary><pre>{html.escape(text)}</pre></details>")
        style = (
            "body{font:15px system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
            "table{border-collapse:collapse}td,th{border-bottom:1px solid #ddd;padding:.25em .8em;text-align:left;vertical-align:top}"
            "pre{overflow-x:auto;background:#f6f6f4;padding:1em;font-size:13px}summary{cursor:pointer;padding:.2em 0}"
        )
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fulmen: {html.escape(self.name)}</title>'
            f"<style>{style}</style></head><body>{''.join(parts)}</body></html>"
        )

    def save_html(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_html())


def explain(fn_or_module, *args, _executors=None, **kwargs):
    """Compiles `fn_or_module` for these arguments and tells what became of it. A torch module or function is acquired
    through Dynamo (its program runs once, in training if a parameter or argument wants a gradient); a function over
    arrays, or one of fulmen.jit, fulmen.grad, by calling it."""
    from fulmen._arrays import TracedFunction, flatten

    torch = sys.modules.get("torch")
    form = getattr(fn_or_module, "array_form", None)
    traced = getattr(form or fn_or_module, "traced", form or fn_or_module)
    is_torch = torch is not None and (
        isinstance(fn_or_module, torch.nn.Module) or any(isinstance(x, torch.Tensor) for x in flatten((args, kwargs))[0])
    )
    if is_torch and not isinstance(traced, TracedFunction):
        from fulmen._explain_torch import explain_torch

        return explain_torch(getattr(fn_or_module, "function", fn_or_module), args, kwargs, _executors)
    if not isinstance(traced, TracedFunction):
        if not callable(fn_or_module):
            raise TypeError(f"explain: a function or a torch.nn.Module is needed, found {type(fn_or_module).__name__}")
        traced = TracedFunction(getattr(fn_or_module, "function", fn_or_module), _executors)
    traced(*args, **kwargs)
    trace = traced.last.trace
    compiled = _core.compile(trace, traced.executors if _executors is None else _executors, training=traced.wanted is not None, keep_texts=True)
    return Explanation(traced.__name__, [(trace, compiled)], [], trace.node_count)
