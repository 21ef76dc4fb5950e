#!/bin/sh
# Everything that needs a CUDA card, in one go: builds, tests, times, and writes what came out.
#
#   tools/gpu_check.sh [DIRECTORY]     results go there, out/gpu by default
#
# PYTHON chooses the interpreter, which must have a PyTorch with CUDA, Triton and pytest (see
# requirements/dev.txt). QUICK=1 leaves most timings out. The script goes on after a failure, and
# ends with status 1 if there was one.
set -u
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
status=0

run() { # NAME COMMAND...: the command's output goes to a file, its status into the summary
    name=$1
    shift
    echo "== $name"
    if "$@" >"$out/$name.txt" 2>&1; then result=true; else result=false status=1; fi
    tail -n 3 "$out/$name.txt"
    printf '{"step": "%s", "passed": %s}\n' "$name" "$result" >>"$out/summary.jsonl"
}

: >"$out/summary.jsonl"
run card "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_properties(0))' || exit 1
run compile "$python" tools/gpu_compile.py --json
run tests timeout 400 "$python" -m pytest tests/test_gpu.py tests/test_torch_gpu.py -q -m "not slow"
run sanitizer timeout 100 sh -c 'command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; exit 1; }
    compute-sanitizer --error-exitcode 1 '"$python"' -m pytest tests/test_gpu.py -q -k "test_plainly"'
run bench "$python" tools/gpu_bench.py ${QUICK:+--quick} --json "$out/bench.jsonl"
echo "results: $out"
exit $status
