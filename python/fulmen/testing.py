"""The conformance suite of executors: does one keep what it promises?

    report = fulmen.testing.check_executor("mine")
    print(report)
    report.require_no_faults()

Every good sample of the op catalogue is offered to the executor, in the dtypes and layouts that programs bring: bf16,
f16 and f64 beside f32, rows with gaps, columns first, stride 0, sizes 0 and 1. What it claims is run on the CPU, on
memory with canaries, from two threads, and compared with a float64 reference; what it refuses must have a code and a
sentence. Programs that differentiate the samples follow, with every node that it claims run by it.
"""

import json

from fulmen import _core
from fulmen._core import Error, TypeError, UnsupportedError

# What a fault can break, and what each promise is.
promises = {
    "claim": "asked twice it answers the same, and never raises; a claim for training brings its backward; asked for deterministic results it claims no plan that isn't",
    "refusal": "one line that starts with the op's name and says what was found",
    "run": "what is claimed runs",
    "numbers": "within twice the reference's error in that dtype, or 4 ulp of the largest element",
    "memory": "only elements of the results are written",
    "inputs": "operands are left as they are",
    "repeat": "a deterministic kernel gives the same bits again, from another thread too",
    "gradient": "gradients of programs in which it runs what it claims are right",
    "result": "it claims something: a check of nothing proves nothing",
}


class Fault:
    """A broken promise: `promise` (a key of fulmen.testing.promises), `call` ("matmul/plain (bf16)"), `text` (what was
    found), `program` (the trace, which `fulmen run` takes)."""

    def __init__(self, promise, call, text, program):
        self.promise, self.call, self.text, self.program = promise, call, text, program

    def __str__(self):
        return f"{self.call}: {self.promise}: {self.text}"

    def __repr__(self):
        return f"<fulmen.testing.Fault {self}>"


class Report:
    """`executor`, `calls` (forms of samples that were offered), `claimed`, `claimed_by_op`, `gradients` (programs compared),
    `refusals` (code -> how often), `faults`; `ok` where there is none. `str()` names each fault once an op and promise."""

    def __init__(self, executor):
        self.executor = executor
        self.calls = self.claimed = self.gradients = 0
        self.claimed_by_op, self.refusals, self.faults = {}, {}, []

    @property
    def ok(self):
        return not self.faults

    def require_no_faults(self):
        """Raises AssertionError with the report if a promise is broken."""
        if self.faults:
            raise AssertionError(str(self))

    def to_dict(self):
        return {
            "executor": self.executor,
            "ok": self.ok,
            "calls": self.calls,
            "claimed": self.claimed,
            "claimed_by_op": self.claimed_by_op,
            "gradients": self.gradients,
            "refusals": self.refusals,
            "faults": [{"promise": f.promise, "call": f.call, "text": f.text, "program": f.program} for f in self.faults],
        }

    def to_json(self, indent=None):
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self):
        verdict = "keeps its promises" if self.ok else f"breaks a promise in {len(self.faults)} places"
        lines = [
            f"{self.executor} {verdict}: {self.claimed} of {self.calls} calls claimed, of {len(self.claimed_by_op)} ops; {self.gradients} gradients compared",
        ]
        if self.refusals:
            lines.append("  refusals: " + ", ".join(f"{code} {count}" for code, count in sorted(self.refusals.items())))
        groups = {}
        for fault in self.faults:
            groups.setdefault((fault.call.partition("/")[0], fault.promise), []).append(fault)
        for (_, promise), faults in groups.items():
            more = f" (and {len(faults) - 1} like it)" if len(faults) > 1 else ""
            lines.append(f"  {faults[0]}{more}")
            lines.append(f"    promised: {promises[promise]}")
        return "\n".join(lines)

    def __repr__(self):
        return f"<fulmen.testing.Report {self.executor}: {self.claimed} of {self.calls} claimed, {len(self.faults)} faults>"


def check_executor(executor, ops=None, dtypes=None, *, layouts=True, gradients=True):
    """Checks an executor, by its name or itself, in C++ or Python. Runs on this machine's CPU.

    ops: names; None is the whole catalogue. dtypes: float dtypes that f32 operands are replaced by, beside each sample as
    it is written; None is bf16, f16 and f64. layouts: with rows with gaps, columns first and stride 0. gradients: with
    the programs that differentiate the samples. UnsupportedError if the executor can't be used on this machine.
    """
    from fulmen._executors import resolve

    chosen = resolve([executor])[0]
    if chosen.unavailable_reason:
        raise UnsupportedError(f"check_executor: {chosen.name} can't be used here: {chosen.unavailable_reason}")
    known = [entry["name"] for entry in _core.ops()]
    for argument, given in (("ops", ops), ("dtypes", dtypes)):
        if given is not None and (isinstance(given, (str, bytes)) or not hasattr(given, "__iter__")):
            raise TypeError(f"check_executor: {argument} is {given!r}; a list of names is needed")
    for op in ops or ():
        if op not in known:
            raise UnsupportedError(f"check_executor: op {op!r} is not in the catalogue")
    dtypes = ["bf16", "f16", "f64"] if dtypes is None else list(dtypes)
    report = Report(chosen.name)
    for op in known if ops is None else ops:
        try:
            part = _core.check_op(chosen, op, dtypes, layouts, gradients)
        except Error as error:
            if isinstance(error, TypeError):
                raise
            report.faults.append(Fault("run", f"{op}/samples", str(error), ""))
            continue
        report.calls += part["calls"]
        report.claimed += part["claimed"]
        report.gradients += part["gradients"]
        if part["claimed"]:
            report.claimed_by_op[op] = part["claimed"]
        for code, count in part["refusals"].items():
            report.refusals[code] = report.refusals.get(code, 0) + count
        report.faults += [Fault(*fault) for fault in part["faults"]]
    if not report.claimed:
        report.faults.append(Fault("result", "all calls", f"{chosen.name} claims none of {report.calls} calls", ""))
    return report
