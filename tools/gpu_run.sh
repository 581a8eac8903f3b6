#!/bin/bash
# Runs Fulmen on a machine with a GPU that has a compiler, CMake, Ninja, PyTorch with CUDA and cuDNN, and no network.
#
#   tools/gpu_run.sh pack            here: builds the GPU tests and puts them, with the headers that the other machine
#                                    lacks, into .carry/ (ignored by git); that folder travels with the tree
#   tools/gpu_run.sh tests [ARGS]    there: runs the packed tests; ARGS are GoogleTest's, results go to $OUT
#   tools/gpu_run.sh fuzz CALLS      there: that many random attention calls, shared out to 14 processes
#   tools/gpu_run.sh probe           there: which calls need the cures of src/executors/cudnn/known_faults.cpp
#   tools/gpu_run.sh build           there: the Python extension for that machine's Python, from the packed library and
#                                    the packed headers and bindings, into /tmp/fulmen_build
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
    # The frontend's files name each other by ../include/.
    mkdir -p .carry/cudnn_frontend/include .carry/lib .carry/tree
    cp -r "$include"/include/cudnn_* .carry/cudnn_frontend/include/
    cp "$folder/libfulmen.a" .carry/lib/
    strip --strip-debug .carry/lib/libfulmen.a
    find src include \( -name '*.h' -o -name '*.inc' \) -print0 | xargs -0 cp --parents -t .carry/tree
    cp -r --parents python .carry/tree
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
  fuzz)
    shift
    find_cudnn
    calls=${1:-20000}
    export FULMEN_FUZZ_CALLS=$(((calls + 13) / 14)) FULMEN_FUZZ_SECONDS=${FULMEN_FUZZ_SECONDS:-500}
    seq 1 14 | xargs -P 14 -I{} sh -c 'FULMEN_FUZZ_SEED=$(({} * 100000)) .carry/bin/fulmen_gpu_tests --gtest_color=no \
      --gtest_filter=GpuFuzz.* >"'"$out"'/fuzz_{}.txt" 2>&1' || true
    grep -h '  fuzz:' "$out"/fuzz_*.txt | awk '{calls += $2; shapes += $5; refused += $10; wrong += $12}
      END {print calls " calls of " shapes " shapes, " refused " refused, " wrong " wrong, in " NR " of 14 processes"}' | tee "$out/fuzz.txt"
    grep -h '  verdicts:' "$out"/fuzz_*.txt | awk '{asked += $2; agree += $(NF-1)}
      END {print asked " random calls asked of the handle and of the description, " agree " agree"}' | tee -a "$out/fuzz.txt"
    grep -h -A1 'wrong in\|at hand:' "$out"/fuzz_*.txt | head -100 | tee -a "$out/fuzz.txt"
    ;;
  probe)
    find_cudnn
    seq 0 7 | xargs -P 8 -I{} sh -c 'FULMEN_GPU_PROBE={}/8 .carry/bin/fulmen_gpu_tests --gtest_color=no \
      --gtest_filter=GpuFaultProbe.* >"'"$out"'/probe_{}.txt" 2>&1' || true
    grep -h "^probe:" "$out"/probe_*.txt | sort | tee "$out/probe.txt"
    ;;
  build)
    mkdir -p "$build/objects" "$build/python/fulmen"
    tree=$root/.carry/tree nanobind=$root/.carry/python/nanobind
    suffix=$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    flags="-std=c++20 -O2 -fPIC -fvisibility=hidden -DFULMEN_X86=1 -DNDEBUG -w -I$tree/src -I$tree/include -I$tree/python/bindings
           -I$nanobind/include -I$nanobind/ext/robin_map/include -I$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    ls "$tree"/python/bindings/*.cpp "$nanobind/src/nb_combined.cpp" |
      xargs -P 16 -I{} sh -c '${CXX:-g++} '"$(echo $flags)"' -fno-strict-aliasing -c {} -o '"$build"'/objects/$(basename {}).o'
    ${CXX:-g++} -shared -o "$build/python/fulmen/_core$suffix" "$build"/objects/*.o .carry/lib/libfulmen.a \
      -static-libstdc++ -static-libgcc -ldl -lpthread
    ln -sf "$tree/python/fulmen/__init__.py" "$build/python/fulmen/__init__.py"
    PYTHONPATH=$build/python python3 -c 'import fulmen; print("fulmen", fulmen.__file__)'
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
    sed -n '2,15p' "$0"
    exit 2
    ;;
esac
