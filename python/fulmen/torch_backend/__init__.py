"""PyTorch as a front end: torch.compile(model, backend="fulmen").

backend.py is the entry; record.py walks Dynamo's graph with the table of calls (calls*.py) and recording.py; values.py
makes views and in-place ops functional; partition.py leaves unknown calls to PyTorch; specialise.py keeps one program a
set of sizes; bridge.py runs it under autograd.
"""

from .backend import Report, fulmen_backend, last_report, listen
from .record import Fallback, Modes, RecordedGraph, record
from .specialise import Options

__all__ = [
    "Fallback", "Modes", "Options", "RecordedGraph", "Report", "fulmen_backend", "last_report", "listen", "record",
]
