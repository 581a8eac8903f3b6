"""fulmen.audit: claimed kernels compared with the op's decomposition on first use."""

from fulmen import _core


class audit:
    """Switches the audit on: from here on, or for a `with` block.

    The first use of each claimed call is compared with the op's decomposition, forward and backward; a claim whose numbers
    differ by more than rounding explains is revoked with one warning, and the next executor gives the result. The
    environment variable FULMEN_AUDIT=1 does the same from the start. A compared call costs the decomposition twice, on
    the CPU; src/driver/audit.h says what is left out.

    with fulmen.audit() as seen:
        model(x).sum().backward()
    print(seen.checked, seen.differing, seen.left_out)
    """

    def __init__(self, on=True):
        self._before = _core.set_audit(bool(on))
        self._counts = _core.audit_counts()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _core.set_audit(self._before)

    def _since(self, index):
        return _core.audit_counts()[index] - self._counts[index]

    @property
    def checked(self):
        """Calls compared since this audit began."""
        return self._since(0)

    @property
    def differing(self):
        """Of them, those whose claim was revoked."""
        return self._since(1)

    @property
    def left_out(self):
        """Calls that couldn't be compared."""
        return self._since(2)

    def __str__(self):
        return f"audit: {self.checked} calls checked, {self.differing} differ, {self.left_out} left out"
