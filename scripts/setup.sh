# Sourced by quickstart.sh and test.sh: make the virtual environment $1 with compressor and the extras $2.
# COMPRESSOR_TORCH chooses the torch requirement, such as torch==2.13.0.
venv="$1"
extras="${2:+[$2]}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
stamp="$venv/.compressor-${2:-base}"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  "$venv/bin/python" -m pip install --quiet --upgrade pip
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    "$venv/bin/python" -m pip install --quiet "${COMPRESSOR_TORCH:-torch}"
  fi
  "$venv/bin/python" -m pip install --quiet --editable ".$extras"
  touch "$stamp"
fi
