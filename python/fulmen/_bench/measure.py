"""Times of several ways to do one thing: they take turns, so that what disturbs the machine disturbs all of them."""

import statistics
import time


def synchronise(device):
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def alternate(ways, device="cpu", repeats=None, seconds=1.5):
    """`ways`: name -> a function that runs once and returns a tuple of times in ms, or None to have it timed here.
    Gives name -> the median of each time. Without `repeats`, as many turns as fit in `seconds`, 5 to 200."""
    for run in ways.values():  # warm: caches, compiled programs, mapped pages
        run()
        run()
    synchronise(device)
    times = {name: [] for name in ways}
    begin = time.perf_counter()
    turn = 0
    while True:
        for name, run in ways.items():
            start = time.perf_counter()
            parts = run()
            synchronise(device)
            total = (time.perf_counter() - start) * 1e3
            times[name].append(parts if parts is not None else (total,))
        turn += 1
        if repeats is not None:
            if turn >= repeats:
                break
        elif turn >= 200 or (turn >= 5 and time.perf_counter() - begin > seconds):
            break
    return {name: [statistics.median(column) for column in zip(*rows)] for name, rows in times.items()}


def row(name, fulmen_ms, peers, **more):
    ratio = min(peers.values()) / fulmen_ms if peers and fulmen_ms > 0 else None
    return {"name": name, "fulmen_ms": fulmen_ms, "peers": peers, "ratio": ratio, **more}
