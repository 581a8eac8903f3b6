"""The cuDNN executor with a library that is absent, damaged, too old or half installed: unavailable with the reason, and
everything else works. Each case is a process of its own, since a library is opened once."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import fulmen

CODE = """
import json, torch, fulmen
(cudnn,) = [e for e in fulmen.executors() if e.name == "cudnn"]
answer = fulmen.claims("sdpa", q="bf16[1,2,64,64]", k="bf16[1,2,64,64]", v="bf16[1,2,64,64]", training=True, target="h200")
q = torch.randn(1, 2, 8, 16).requires_grad_()
fulmen.sdpa(q, q, q).sum().backward()
print(json.dumps({"available": cudnn.available, "reason": cudnn.unavailable_reason, "code": answer[0].code, "said": answer[0].reason, "winner": answer.winner, "finite": bool(torch.isfinite(q.grad).all())}))
"""

OLD = """
#include <stddef.h>
size_t cudnnGetVersion(void) { return 90100; }
size_t cudnnGetCudartVersion(void) { return 12040; }
"""


def ask(library):
    done = subprocess.run([sys.executable, "-c", CODE], env=dict(os.environ, FULMEN_CUDNN_LIBRARY=str(library)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compiled(folder, source):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    (folder / "library.c").write_text(source)
    path = folder / "libcudnn.so.9"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "library.c"], check=True)
    return path


def half_of_the_real_one(folder):
    version = [e.version for e in fulmen.executors() if e.name == "cudnn"][0]
    path = version.partition("(")[2].partition(",")[0]
    if not os.path.exists(path):
        pytest.skip("no cuDNN here")
    # Only the front library, whose loader path leads nowhere near the parts beside the original.
    shutil.copyfile(path, folder / "libcudnn.so.9")
    return folder


CASES = {
    "nothing there": (lambda folder: folder / "libcudnn.so.9", "not found"),
    "garbage": (lambda folder: (folder / "libcudnn.so.9").write_bytes(b"no library at all" * 100) and folder, "not found"),
    "another library": (lambda folder: compiled(folder, "int nothing(void) { return 0; }"), "has no cudnnGetVersion"),
    "too old": (lambda folder: compiled(folder, OLD), "is version 9.1.0, needed is"),
    "half installed": (half_of_the_real_one, "half installed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_library_is_a_reason(name, tmp_path):
    make, words = CASES[name]
    answer = ask(make(tmp_path))
    if "built without" in answer["reason"] or "switched off" in answer["reason"]:
        pytest.skip(answer["reason"])
    if name == "half installed" and answer["available"]:
        pytest.skip("the parts are on the loader's own path")
    assert not answer["available"] and words in answer["reason"], answer
    assert answer["code"] == "unavailable" and words in answer["said"] and answer["winner"] is None, answer
    assert answer["finite"]


def test_counters_are_shown():
    if not [e for e in fulmen.executors() if e.name == "cudnn" and e.available]:
        pytest.skip("no cuDNN here")
    spec = "bf16[1,2,72,64]"
    counts = []
    for _ in range(3):
        counts.append(fulmen.cache_info()["executors"]["cudnn"])
        fulmen.claims("sdpa", q=spec, k=spec, v=spec, training=True, target="h200", executors=["cudnn"])
    first, second = ({name: b[name] - a[name] for name in a} for a, b in zip(counts, counts[1:]))
    assert first["claims"] >= 1 and first["proofs"] == 2
    assert second["proofs"] == 0 and second["claim_hits"] >= 1
    assert counts[0]["builds_forward"] == counts[0]["builds_backward"] == 0, "a described target builds nothing"
