"""What asking costs: claims of a training call on this CPU and on described GPUs. There is no peer."""

import fulmen
from fulmen._bench.measure import alternate, row

_shapes = [("b2 h32 s4096 d128 causal", "bf16[2,32,4096,128]"), ("b2 h16 s1024 d320", "bf16[2,16,1024,320]")]


def rows(device, peers, only, repeats, dtypes):
    for target in ("cpu", "h200"):
        for name, spec in _shapes:
            label = f"{target}: {name}"
            if only and only not in label:
                continue
            winner = None

            def ask():
                nonlocal winner
                winner = fulmen.claims("sdpa", q=spec, k=spec, v=spec, is_causal="causal" in name, training=True, target=target).winner

            ours = alternate({"fulmen": ask}, "cpu", repeats, seconds=0.5)["fulmen"][0]
            yield row(label, ours, {}, winner=winner)
