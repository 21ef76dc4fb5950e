#!/bin/sh
# Everything that needs a CUDA card, in one go and within ten minutes: builds, tests, times, and
# writes what came out.
#
#   tools/gpu_check.sh [DIRECTORY]     results go there, out/gpu by default
#
# PYTHON chooses the interpreter, which must have a PyTorch with CUDA, Triton, pytest and matplotlib
# (see requirements/dev.txt). Each part has so many seconds; MINUTES (10) scales them all. What did
# not fit is named in the part's output. The script goes on after a failure, and ends with status 1
# if there was one.
set -u
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
python=${PYTHON:-python3}
minutes=${MINUTES:-10}
mkdir -p "$out"
status=0

seconds() { # of ten minutes
    echo $(($1 * minutes / 10))
}

run() { # NAME SECONDS COMMAND...: output goes to a file, the status into the summary
    name=$1
    limit=$(seconds "$2")
    shift 2
    echo "== $name, at most $limit seconds"
    begin=$(date +%s)
    if timeout -k 10 "$limit" "$@" >"$out/$name.txt" 2>&1; then result=passed; else
        if [ $? -ge 124 ]; then result="out of time"; else result=failed; fi
        status=1
    fi
    tail -n 3 "$out/$name.txt"
    printf '{"part": "%s", "result": "%s", "seconds": %d}\n' \
        "$name" "$result" $(($(date +%s) - begin)) >>"$out/summary.jsonl"
}

: >"$out/summary.jsonl"
run card 30 "$python" -c 'import torch, triton
print(torch.__version__, triton.__version__, torch.cuda.get_device_properties(0))' || exit 1
[ $status = 0 ] || exit 1
run tests 210 "$python" -m pytest tests/test_gpu.py tests/test_torch_gpu.py -q -m "not slow" \
    --deselect tests/test_gpu.py::test_programs_wait_for_one_another \
    --deselect tests/test_gpu.py::test_kernels_compile_without_a_card
run stress 70 "$python" tools/gpu_stress.py --launches 100000 --seconds "$(seconds 55)"
if command -v compute-sanitizer >/dev/null; then # each tier, every access
    run sanitizer 60 compute-sanitizer --error-exitcode 1 \
        "$python" -m pytest tests/test_gpu.py -q -k test_plainly
else
    echo '{"part": "sanitizer", "result": "there is no compute-sanitizer"}' >>"$out/summary.jsonl"
fi
run bench 220 "$python" tools/gpu_bench.py --out "$out" --seconds "$(seconds 190)"
cat "$out/summary.jsonl"
echo "results: $out"
exit $status
