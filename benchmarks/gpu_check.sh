#!/usr/bin/env bash
# Checks the suite on a machine with a recent NVIDIA GPU, in at most eight minutes and without network:
#
#     benchmarks/gpu_check.sh [FOLDER]                    FOLDER, $OUT or ./gpu_check gets report.md, check.json, and
#                                                         what `multimodal benchmark` writes
#     benchmarks/gpu_check.sh FOLDER --device cpu --quick the same on a CPU, as a rehearsal
#
# PYTHON is the interpreter (default: python3). What its packages do not allow is told and skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
