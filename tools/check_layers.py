#!/usr/bin/env python3
"""Checks the include lines of src/: nothing points upward, executors never include each other, vendor headers stay in
their executor's folder, and no torch header appears in C++. Prints each fault as file:line and exits 1 if there is one.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What each folder may include, beside itself and the standard library.
ALLOWED = {
    "core": set(),
    "ir": {"core"},
    "runtime": {"core"},
    "ops": {"core", "ir"},
    "tracing": {"core", "ir", "ops"},
    "claiming": {"core", "ir", "ops", "runtime", "executors"},
    "passes": {"core", "ir", "ops", "runtime", "claiming", "executors"},
    "executors": {"core", "ir", "ops", "runtime"},
    "conformance": {"core", "ir", "ops", "passes", "claiming", "executors", "runtime"},
    "driver": {"core", "ir", "ops", "tracing", "passes", "claiming", "executors", "runtime", "fulmen"},
}
# The interface is for everyone; the list of executors only for the driver and the bindings.
EXECUTOR_INTERFACE = {"executors/executor.h"}
VENDOR = re.compile(r"^(cuda|cudnn|cublas|nvrtc|dnnl|oneapi/dnnl|nvtx)")
TORCH = re.compile(r"^(torch|ATen|c10)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def faults_of(path: pathlib.Path):
    relative = path.relative_to(ROOT / "src")
    layer = relative.parts[0]
    executor = relative.parts[1] if layer == "executors" and len(relative.parts) > 2 else None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        name = match.group(1)
        where = f"src/{relative}:{number}"
        if TORCH.match(name):
            yield f"{where}: {name}: no torch header in C++"
        if VENDOR.match(name) and executor is None and not str(relative).startswith("runtime/cuda"):
            yield f"{where}: {name}: vendor headers stay inside their executor's folder"
        parts = name.split("/")
        if len(parts) < 2 or parts[0] not in ALLOWED or (parts[0] == layer and layer != "executors"):
            continue
        if layer == "executors":
            if executor is None:
                continue  # executor.h and default_list.cpp
            if parts[0] == "executors" and name not in EXECUTOR_INTERFACE and parts[1] != executor:
                yield f"{where}: {name}: an executor never includes another"
            if parts[0] != "executors" and parts[0] not in ALLOWED["executors"]:
                yield f"{where}: {name}: an executor may include core, ir, ops, runtime and the executor interface"
            continue
        if parts[0] not in ALLOWED[layer]:
            yield f"{where}: {name}: {layer} may not include {parts[0]}"
        elif parts[0] == "executors" and layer in ("claiming", "passes") and name not in EXECUTOR_INTERFACE:
            yield f"{where}: {name}: {layer} knows the executor interface only, no executor"


def main() -> int:
    files = sorted((ROOT / "src").rglob("*.h")) + sorted((ROOT / "src").rglob("*.cpp"))
    faults = [fault for path in files for fault in faults_of(path)]
    for fault in faults:
        print(fault)
    print(f"{len(files)} files checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
