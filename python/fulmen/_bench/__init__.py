"""`fulmen bench`: Fulmen beside its peers, in one process, alternating, medians. ratio is the best peer's time over
Fulmen's, so above 1 is a win. The measuring is in measure.py, each suite in a file of its own."""

import importlib
import math
import platform

from fulmen._core import UnsupportedError

_peers = {"attention": ["torch"], "train": ["torch", "inductor"], "overhead": ["torch"], "claims": []}  # unless asked for others
_known_peers, _known_dtypes = ("torch", "inductor"), {"attention": ("fp32", "bf16", "fp16"), "train": ("fp32", "bf16")}


class Result:
    """Rows of measurements with their geometric mean."""

    def __init__(self, suite, device, rows):
        self.suite, self.device, self.rows = suite, device, rows

    @property
    def geomean(self):
        ratios = [row["ratio"] for row in self.rows if row["ratio"]]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None

    def to_dict(self):
        return {"suite": self.suite, "rows": self.rows, "geomean": self.geomean, "device": self.device, "versions": versions()}

    def __str__(self):
        peers = sorted({peer for row in self.rows for peer in row["peers"]})
        lines = [f"{self.suite} on {self.device}: {', '.join(f'{k} {v}' for k, v in versions().items())}"]
        lines.append(f"{'':<44}{'fulmen ms':>11}" + "".join(f"{peer + ' ms':>13}" for peer in peers) + f"{'ratio':>8}")
        for row in self.rows:
            cells = "".join(f"{row['peers'][p]:>13.3f}" if p in row["peers"] else f"{'-':>13}" for p in peers)
            lines.append(f"{row['name']:<44}{row['fulmen_ms']:>11.3f}{cells}" + (f"{row['ratio']:>8.2f}" if row["ratio"] else ""))
        if self.geomean:
            lines.append(f"geometric mean of the ratios: {self.geomean:.2f}")
        return "\n".join(lines)


def versions():
    import fulmen

    found = {"fulmen": fulmen.__version__, "python": platform.python_version()}
    import sys

    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].__version__
        found["threads"] = sys.modules["torch"].get_num_threads()
    return found


def device_name(device):
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check(what, peers=None, dtypes=None):
    """ValueError if the suite doesn't have such a peer or dtype."""
    for peer in peers or ():
        if peer not in _known_peers:
            raise ValueError(f"--peers: there is no peer '{peer}'; peers: {', '.join(_known_peers)}")
    for dtype in dtypes or ():
        if dtype not in _known_dtypes.get(what, ()):
            known = ", ".join(_known_dtypes[what]) if what in _known_dtypes else "it has one form"
            raise ValueError(f"--dtype: {what} has no rows of '{dtype}'; dtypes: {known}")


def bench(what, device="cpu", peers=None, only=None, repeats=None, dtypes=None, progress=False):
    """Runs one suite: "attention", "train", "overhead" or "claims"."""
    if what != "claims" and device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("bench: there is no CUDA device on this machine")
    chosen = _peers[what] if peers is None else peers
    check(what, chosen, dtypes)
    suite = importlib.import_module(f"fulmen._bench.{what}")
    rows = []
    for row in suite.rows(device, chosen, only, repeats, dtypes):
        rows.append(row)
        if progress:
            peers_text = ", ".join(f"{name} {ms:.3f}" for name, ms in row["peers"].items())
            print(f"  {row['name']:<44} fulmen {row['fulmen_ms']:.3f} ms; {peers_text}", flush=True)
    if not rows:
        raise UnsupportedError(f"bench: no row of {what} has '{only}' in its name")
    return Result(what, device_name(device) if what != "claims" else device_name("cpu"), rows)
