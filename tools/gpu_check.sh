#!/bin/sh
# tools/gpu_check.py, with the interpreter that PYTHON chooses: everything that needs a CUDA card,
# in one go and within nine minutes.
#
#   tools/gpu_check.sh [DIRECTORY]     results go there, out/gpu by default
exec "${PYTHON:-python3}" -u "$(dirname "$0")/gpu_check.py" "$@"
