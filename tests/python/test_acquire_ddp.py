"""Two processes train DistributedDataParallel(model) compiled with Fulmen, with the losses of plain PyTorch."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

PROGRAM = textwrap.dedent(
    """
    import copy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from fulmen import torch_backend

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

        def forward(self, tokens):
            return self.layers(tokens)

    model = Model()

    def losses(model, compile):
        wrapped = DistributedDataParallel(model)
        call = torch.compile(wrapped, backend=torch_backend.fulmen_backend) if compile else wrapped
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        generator = torch.Generator().manual_seed(rank)
        found = []
        for _ in range(5):
            tokens = torch.randint(0, 16, (4, 8), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    eager = losses(copy.deepcopy(model), False)
    with torch_backend.listen() as reports:
        ours = losses(model, True)
    assert reports and all(not r.fallbacks for r in reports), reports
    assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(ours, eager)), (ours, eager)
    print("same losses", rank, ours[-1])
    dist.destroy_process_group()
    """
)


@pytest.mark.slow
def test_two_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("same losses") == 2
