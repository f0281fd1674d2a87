#!/usr/bin/env bash
# Make .venv with everything in requirements.txt and mfsdp itself (editable), and compile the bytecode once.
# A second run sees that nothing changed and ends at once. MFSDP_PYTHON=/path/to/python3.12 chooses the interpreter.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/mfsdp-installed
uv_pin=uv==0.13.9

say() { printf '[install] %s\n' "$*" >&2; }

# Python 3.12 that starts and can make an environment; a pyenv shim exists without either.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n ${MFSDP_PYTHON:-} ]]; then
    if usable "$MFSDP_PYTHON"; then printf '%s\n' "$MFSDP_PYTHON"; return 0; fi
    say "error: MFSDP_PYTHON=$MFSDP_PYTHON is no working Python 3.12"
    return 1
  fi
  while IFS= read -r candidate; do
    if [[ -n $candidate ]] && usable "$candidate"; then printf '%s\n' "$candidate"; return 0; fi
  done < <(
    type -ap python3.12 python3 python || true
    shopt -s nullglob
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python /usr/bin/python3.12 /usr/local/bin/python3.12 \
      "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12 ${CONDA_PREFIX:+"$CONDA_PREFIX/bin/python3.12"} \
      "$HOME"/{miniconda3,anaconda3,miniforge3}/{bin,envs/*/bin}/python3.12
  )
  say "error: no working Python 3.12 on the PATH, in pyenv, uv, conda or /usr/bin"
  say "  install one (apt install python3.12-venv, pyenv install 3.12, conda create -n py312 python=3.12) or set MFSDP_PYTHON"
  return 1
}

# What .venv was made from and how, and its place, since an environment cannot be moved.
wanted_stamp() { (cd "$root" && printf '%s\n' "$root" && sha256sum requirements.txt pyproject.toml scripts/install.sh); }

make_venv() {
  if [[ -d $venv ]] && { ! usable "$venv/bin/python" || [[ -f $stamp && $(head -n 1 "$stamp") != "$root" ]]; }; then
    say "the environment in .venv no longer works here: making it anew"
    rm -rf "$venv"
  fi
  if [[ ! -d $venv ]]; then
    local python
    python=$(find_python)
    say "making .venv with $python"
    "$python" -m venv "$venv"
  fi
}

install_packages() {
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check) count
  # compat: a path in a .pth file, instead of an import hook that costs every start of Python 40 ms
  local editable=(--no-build-isolation --config-settings editable_mode=compat -e .)
  count=$(grep -c == "$root/requirements.txt")
  cd "$root"
  if "${pip[@]}" install -q "$uv_pin"; then
    say "installing $count packages (about a minute with a fast network; 5 GB on the disk)"
    local uv=("$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" --no-deps)
    if "${uv[@]}" -r requirements.txt && "${uv[@]}" "${editable[@]}"; then return 0; fi
    say "uv did not get through; trying pip, which reads pip's own settings"
  else
    say "uv cannot be installed; using pip, which is slower"
  fi
  "${pip[@]}" install -q --no-deps -r requirements.txt
  "${pip[@]}" install -q --no-deps "${editable[@]}"
}

# torch, transformers and megatron import twice as fast from bytecode.
compile_bytecode() {
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  say "compiling bytecode"
  if ! env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore -m compileall -qq -j 0 "$site" "$root/mfsdp_cli"; then
    say "note: some files do not compile (packages ship templates and tests); they are left as they are"
  fi
}

main() {
  if [[ -f $stamp && $(<"$stamp") == "$(wanted_stamp)" ]] && usable "$venv/bin/python"; then return 0; fi
  local start=$SECONDS
  make_venv
  rm -f "$stamp"
  install_packages
  compile_bytecode
  wanted_stamp >"$stamp"
  say "done in $((SECONDS - start)) s; try: .venv/bin/mfsdp --help"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
