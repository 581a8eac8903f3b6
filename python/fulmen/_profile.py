"""fulmen.profile: where the time of compiled programs goes."""

from fulmen import _core


class profile:
    """Collects the time of every instruction of every Fulmen program that runs inside the `with` block.

    with fulmen.profile() as p:
        model(x).backward()
    print(p)
    """

    def __init__(self):
        self._profile = _core.Profile()

    def __enter__(self):
        self._profile.start()
        return self

    def __exit__(self, *_):
        self._profile.stop()

    def rows(self):
        """One row an instruction, longest first: .executor, .op, .node, .calls, .ms (total)."""
        return sorted(self._profile.rows(), key=lambda row: -row.ms)

    def by_op(self):
        """(executor, op, calls, ms) summed over instructions, longest first."""
        sums = {}
        for row in self._profile.rows():
            calls, ms = sums.get((row.executor, row.op), (0, 0.0))
            sums[row.executor, row.op] = (calls + row.calls, ms + row.ms)
        return sorted(((*key, *value) for key, value in sums.items()), key=lambda row: -row[3])

    def __str__(self):
        rows = self.by_op()
        total = sum(row[3] for row in rows) or 1.0
        lines = [f"{executor:<10} {op:<24} {calls:>7} calls {ms:>10.3f} ms {100 * ms / total:5.1f} %" for executor, op, calls, ms in rows]
        return "\n".join(lines)
