"""What `make demo` runs: a GPT trains on the source of Python's standard library through torch.compile(backend="fulmen").

Beside it the same model trains in PyTorch eager from the same seed, so that the losses can be compared step by step; then
the step times of eager, Inductor and Fulmen are measured alternating in this process, and everything is written into one
self-contained page, fulmen-report.html. Ctrl-C ends the training early; what was measured until then is reported.
"""

from __future__ import annotations

import argparse
import copy
import html
import os
import statistics
import sys
import time
import warnings

import torch

import fulmen
from gpt import GPT, GPTConfig, batches, python_source_bytes


class Progress:
    """One line that is rewritten: step, loss, tokens a second, time left."""

    def __init__(self, total: int, tokens_a_step: int):
        self.total, self.tokens = total, tokens_a_step
        self.start = time.perf_counter()
        self.interactive = sys.stderr.isatty()

    def show(self, step: int, loss: float):
        if not self.interactive and step % 50 and step not in (1, self.total):
            return
        elapsed = time.perf_counter() - self.start
        rate = step * self.tokens / elapsed
        left = elapsed / step * (self.total - step)
        filled = 30 * step // self.total
        line = f"[{'#' * filled}{'.' * (30 - filled)}] step {step}/{self.total}  loss {loss:.4f}  {rate:,.0f} tokens/s  {left:4.0f} s left"
        print(("\r" if self.interactive else "") + line, end="" if self.interactive and step < self.total else "\n", file=sys.stderr, flush=True)


def train_step(call, optimizer, tokens, targets) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = call(tokens, targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(call, model, config, data, steps, batch, show=True):
    """(losses, seconds of the first step). Stops early, with what it has, on Ctrl-C."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    progress = Progress(steps, batch * config.length)
    losses, first = [], 0.0
    try:
        for step, (tokens, targets) in zip(range(1, steps + 1), batches(data, config, batch, seed=1)):
            start = time.perf_counter()
            losses.append(train_step(call, optimizer, tokens, targets))
            if step == 1:
                first = time.perf_counter() - start
            if show:
                progress.show(step, losses[-1])
    except KeyboardInterrupt:
        print(f"\nstopped after {len(losses)} steps", file=sys.stderr)
    return losses, first


def compare_step_times(models, config, data, batch, rounds):
    """Median ms of a forward and backward of each (name, call, model), alternating in this process. Ctrl-C ends it early."""
    stream = batches(data, config, batch, seed=2)
    times = {name: [] for name, _, _ in models}
    try:
        for round_index in range(rounds + 1):
            tokens, targets = next(stream)
            for name, call, model in models:
                model.zero_grad(set_to_none=True)
                start = time.perf_counter()
                call(tokens, targets).backward()
                if round_index:  # the first round warms up
                    times[name].append(1e3 * (time.perf_counter() - start))
    except KeyboardInterrupt:
        print("\nstopped measuring step times", file=sys.stderr)
    return {name: statistics.median(values) for name, values in times.items() if values}


def first_step_of_inductor(inductor, data, config, batch):
    """Seconds of it, or None where Inductor can't run this model or Ctrl-C ended it."""
    tokens, targets = next(batches(data, config, batch, seed=3))
    start = time.perf_counter()
    try:
        inductor(tokens, targets).backward()
        return time.perf_counter() - start
    except KeyboardInterrupt:
        print("\nInductor is left out", file=sys.stderr)
    except Exception as error:  # a peer that cannot run here is named, not hidden
        warnings.warn(f"Inductor could not run this model here: {type(error).__name__}: {str(error).splitlines()[0]}")
    return None


def write_report(path: str, page: str):
    """Beside the old report first: a full disk leaves that as it was."""
    beside = f"{path}.part"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(beside, path)
    except OSError:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def curve(series, width=760, height=300) -> str:
    """Loss curves as an inline SVG: {name: (colour, line width, values)}, drawn in this order."""
    left, bottom, top = 46, 40, 14
    longest = max(len(values) for _, _, values in series.values())
    highest = max(max(values) for _, _, values in series.values() if values) * 1.05

    def x_of(step):
        return left + step / max(longest - 1, 1) * (width - left - 16)

    def y_of(loss):
        return height - bottom - loss / highest * (height - bottom - top)

    parts = [f'<svg viewBox="0 0 {width} {height}" style="width:100%;max-width:{width}px" role="img" aria-label="loss over steps">']
    for tick in range(int(highest) + 1):
        parts.append(f'<line x1="{left}" x2="{width - 16}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}" stroke="var(--rule)"/>')
        parts.append(f'<text x="{left - 8}" y="{y_of(tick) + 4:.1f}" font-size="12" text-anchor="end">{tick}</text>')
    for tick in sorted({round(k * (longest - 1) / 5) for k in range(6)}):
        parts.append(f'<text x="{x_of(tick):.1f}" y="{height - bottom + 18}" font-size="12" text-anchor="middle">{tick + 1}</text>')
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 6}" font-size="12" text-anchor="middle">step</text>')
    for name, (colour, line, values) in series.items():
        points = " ".join(f"{x_of(i):.1f},{y_of(v):.1f}" for i, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{line}" stroke-linejoin="round" opacity="{0.4 if line > 3 else 1}"/>')
    legend = "".join(
        f'<span style="margin-right:1.5em"><span class=bar style="width:1.6em;height:{line}px;vertical-align:middle;background:{colour}"></span> {html.escape(name)}</span>'
        for name, (colour, line, _) in series.items()
    )
    return f"<p>Cross entropy of the next byte. {legend}</p>" + "".join(parts) + "</svg>"


def bars(rows) -> str:
    """(name, ms, ours) each as a bar; the longest fills the line."""
    longest = max(ms for _, ms, _ in rows)
    lines = "".join(
        f"<tr><td>{html.escape(name)}</td><td class=n>{ms:.1f} ms</td><td style='width:60%'><span class='bar{' ours' if ours else ''}' "
        f"style='width:{100 * ms / longest:.1f}%'></span></td></tr>"
        for name, ms, ours in rows
    )
    return f"<div class=wide><table style='width:100%;max-width:760px'>{lines}</table></div>"


def rows_table(header, rows) -> str:
    """A table of the report; columns behind the first hold numbers where they look like some."""
    def cell(value, tag="td"):
        text = str(value)
        return f"<{tag}{' class=n' if text[:1].isdigit() else ''}>{html.escape(text)}</{tag}>"

    head = "".join(cell(h, "th") for h in header)
    return f"<div class=wide><table><tr>{head}</tr>" + "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows) + "</table></div>"


def print_table(title, header, rows):
    print(f"\n{title}")
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  " + "  ".join(f"{str(cell):<{width}}" for cell, width in zip(row, widths)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds of the step-time comparison")
    parser.add_argument("--no-inductor", action="store_true", help="leave Inductor out (its first step takes about half a minute)")
    parser.add_argument("--report", default="fulmen-report.html")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.batch < 1 or arguments.rounds < 1:
        parser.error("--steps, --batch and --rounds must be at least 1")

    config = GPTConfig()
    data = python_source_bytes()
    torch.manual_seed(0)
    ours = GPT(config)
    eager = copy.deepcopy(ours)
    parameters = sum(p.numel() for p in ours.parameters())
    print(f"a GPT of {parameters:,} parameters, {len(data):,} bytes of Python source, torch {torch.__version__}, {torch.get_num_threads()} threads")

    print("training through Fulmen", file=sys.stderr)
    compiled = torch.compile(ours, backend="fulmen")
    ours_losses, ours_first = train(compiled, ours, config, data, arguments.steps, arguments.batch)
    if not ours_losses:
        print("stopped before the first step; nothing to report")
        return 130
    print("the same in PyTorch eager", file=sys.stderr)
    eager_losses, eager_first = train(eager, eager, config, data, len(ours_losses), arguments.batch)

    # Rounding differs and training amplifies it, so what must agree is the first 100 steps.
    shared = min(len(ours_losses), len(eager_losses), 100)
    gap = max((abs(a - b) / abs(b) for a, b in zip(ours_losses[:shared], eager_losses[:shared])), default=0.0)
    agree = gap < 1e-3
    print(f"\nloss {ours_losses[0]:.4f} -> {ours_losses[-1]:.4f} in {len(ours_losses)} steps ({len(eager_losses)} in eager); "
          f"largest relative gap to eager over the first {shared} steps: {gap:.2e} ({'they agree' if agree else 'THEY DIFFER'})")

    print("measuring step times, alternating", file=sys.stderr)
    models = [("eager", eager, eager), ("fulmen", compiled, ours)]
    first_steps = {"eager": eager_first, "fulmen": ours_first}
    if not arguments.no_inductor:
        print("compiling with Inductor, about half a minute the first time", file=sys.stderr)
        other = copy.deepcopy(eager)
        inductor = torch.compile(other)
        seconds = first_step_of_inductor(inductor, data, config, arguments.batch)
        if seconds is not None:
            first_steps["inductor"] = seconds
            models.insert(1, ("inductor", inductor, other))
    times = compare_step_times(models, config, data, arguments.batch, arguments.rounds)
    time_rows = [
        (name, f"{times[name]:.1f}", f"{times[name] / times['fulmen']:.2f}x" if "fulmen" in times else "", f"{first_steps[name]:.2f}")
        for name, _, _ in models
        if name in times
    ]
    time_header = ("", "forward + backward, ms", "over fulmen", "first step, s")
    print_table("step times (medians)", time_header, time_rows)

    tokens, targets = next(batches(data, config, arguments.batch, seed=4))
    with fulmen.profile() as profile:
        for _ in range(5):
            ours.zero_grad(set_to_none=True)
            compiled(tokens, targets).backward()
    profile_rows = [(executor, op, calls // 5, f"{ms / 5:.2f}") for executor, op, calls, ms in profile.by_op()]
    profile_header = ("executor", "op", "calls a step", "ms a step")
    print_table("where a step's time goes", profile_header, profile_rows[:12])

    torch._dynamo.reset()
    explanation = fulmen.explain(ours, tokens, targets)
    claim_rows = [(executor, op, direction, count) for (executor, op, direction), count in explanation.by_executor().items()]
    claim_header = ("executor", "op", "direction", "nodes")
    print_table("who runs what", claim_header, claim_rows)
    refusal_rows = [(*key, count) for key, count in explanation.refusals().items()]
    refusal_header = ("executor", "op", "code", "reason", "times")
    if refusal_rows:
        print_table("refusals", refusal_header, refusal_rows[:10])
    print(f"\ncoverage {explanation.coverage:.3f}; {explanation.saved_bytes:,} bytes saved for the backward")

    by_executor = {}
    for executor, _, _, ms in profile.by_op():
        by_executor[executor] = by_executor.get(executor, 0.0) + ms / 5
    top = (
        f"<h1>Fulmen: a GPT trained on this machine</h1>"
        f"<p>{parameters:,} parameters, {len(ours_losses)} steps of {arguments.batch} x {config.length} bytes of the source of Python's "
        f"standard library; loss {ours_losses[0]:.4f} to {ours_losses[-1]:.4f}. Largest relative gap between Fulmen's losses and eager's on "
        f"the same seed, first {shared} steps: {gap:.2e}. PyTorch {torch.__version__}, {torch.get_num_threads()} threads.</p>"
        "<h2>Loss</h2>" + curve({"PyTorch eager": ("var(--other)", 6, eager_losses), "Fulmen": ("var(--ours)", 2, ours_losses)})
        + "<h2>Step times</h2><p>Forward and backward, medians, alternating in one process.</p>"
        + (bars([(name, times[name], name == "fulmen") for name, _, _ in models if name in times]) if times else "")
        + rows_table(time_header, time_rows)
        + "<h2>Time per executor</h2>" + bars([(name, ms, True) for name, ms in sorted(by_executor.items(), key=lambda item: -item[1])])
        + "<h2>Where a step's time goes</h2>" + rows_table(profile_header, profile_rows)
    )
    try:
        write_report(arguments.report, explanation.to_html(top))
    except OSError as error:
        print(f"the report could not be written to {arguments.report}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"report: {arguments.report}")
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; no report was written", file=sys.stderr)
        sys.exit(130)
