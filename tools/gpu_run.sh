#!/bin/bash
# Runs Fulmen on a machine with a GPU that has a compiler, CMake, Ninja, PyTorch with CUDA and cuDNN, and no network.
#
#   tools/gpu_run.sh pack            here: builds the GPU tests and puts them, with the headers that the other machine
#                                    lacks, into .carry/ (ignored by git); that folder travels with the tree
#   tools/gpu_run.sh tests [ARGS]    there: runs the packed tests; ARGS are GoogleTest's, results go to $OUT
#   tools/gpu_run.sh build           there: builds the Python extension for that machine's Python into /tmp/fulmen_build
#   tools/gpu_run.sh python ARGS     there: after `build`, runs that Python with `import fulmen` working
#   tools/gpu_run.sh sanitize [ARGS] there: the packed tests under compute-sanitizer
set -eu
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-/tmp/fulmen_gpu_out}
build=${FULMEN_GPU_BUILD:-/tmp/fulmen_build}
mkdir -p "$out"

find_cudnn() {
  [ -n "${FULMEN_CUDNN_LIBRARY:-}" ] && return
  local folder
  folder=$(python3 -c 'import importlib.util, os
spec = importlib.util.find_spec("nvidia.cudnn")
print(os.path.join(list(spec.submodule_search_locations)[0], "lib") if spec else "")' 2>/dev/null || true)
  if [ -n "$folder" ] && [ -e "$folder/libcudnn.so.9" ]; then export FULMEN_CUDNN_LIBRARY=$folder; fi
}

case ${1:-} in
  pack)
    python=.venv/bin/python
    folder=${FULMEN_PACK_BUILD:-build-gpu-pack}
    cmake -G Ninja -B "$folder" -DFULMEN_BUILD_PYTHON=OFF >/dev/null
    nice ninja -C "$folder" fulmen_gpu_tests
    rm -rf .carry
    mkdir -p .carry/bin .carry/cudnn .carry/cudnn_frontend .carry/python
    cp "$folder/fulmen_gpu_tests" .carry/bin/
    strip .carry/bin/fulmen_gpu_tests
    include=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -r "$include"/include/cudnn_* .carry/cudnn_frontend/
    for place in /usr/local/cuda/include /usr/local/include "$include/nvidia/cudnn/include"; do
      if [ -e "$place/cudnn.h" ]; then cp "$place"/cudnn*.h .carry/cudnn/; break; fi
    done
    cp -r "$include/nanobind" .carry/python/
    find .carry -name '__pycache__' -prune -exec rm -rf {} +
    du -sh .carry
    ;;
  tests)
    shift
    find_cudnn
    export FULMEN_GPU_RESULTS=${FULMEN_GPU_RESULTS:-$out/attention_times.json}
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/machine.txt"
    set -o pipefail
    .carry/bin/fulmen_gpu_tests --gtest_color=no "$@" 2>&1 | tee "$out/gpu_tests.txt"
    ;;
  build)
    PYTHONPATH=$root/.carry/python cmake -G Ninja -S . -B "$build" -DFULMEN_BUILD_TESTS=OFF -DPython_EXECUTABLE="$(command -v python3)"
    PYTHONPATH=$root/.carry/python nice ninja -C "$build" _core
    ;;
  python)
    shift
    find_cudnn
    PYTHONPATH=$build/python:$root/.carry/python${PYTHONPATH:+:$PYTHONPATH} exec python3 "$@"
    ;;
  sanitize)
    shift
    find_cudnn
    set -o pipefail
    compute-sanitizer --tool memcheck --error-exitcode 9 .carry/bin/fulmen_gpu_tests --gtest_color=no "$@" 2>&1 | tee "$out/sanitizer.txt"
    ;;
  *)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
