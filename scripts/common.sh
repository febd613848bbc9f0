# shellcheck shell=bash
# Sourced by the other scripts, with `set -euo pipefail` on: finds a Python, and keeps .venv complete.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/.complete       # written last; holds the key of what was installed
unfinished=$venv/.unfinished # there from before the first write into .venv until the stamp

say() {
  printf '%s\n' "$*" >&2
}

# True if $1 runs, is a Python that Megatron has wheels for, and can make an environment. A file of that name is not
# enough: pyenv puts a python3.12 on PATH that fails, and Debian's python3 lacks ensurepip.
python_answers() {
  "$1" -c 'import ensurepip, ssl, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
    </dev/null >/dev/null 2>&1
}

# Prints the first Python that answers. $PYTHON comes first, for those who have one in an unusual place.
find_python() {
  local candidate pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3 \
    "$pyenv"/versions/3.12*/bin/python "$pyenv"/versions/3.13*/bin/python; do
    if [[ -n $candidate ]] && python_answers "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  say "No Python 3.12 or 3.13 with its venv module answers here (tried \$PYTHON, python3.13, python3.12, python3 and" \
    "$pyenv). Install one, for instance with 'apt-get install python3.12-venv', 'pyenv install 3.12' or 'conda create" \
    "-n py312 python=3.12', or set PYTHON to the full path of one; then call this again."
  return 1
}

# True if .venv holds what the project imports. Looks without importing, so it costs a few hundredths of a second.
venv_has_all() {
  "$venv/bin/python" - >/dev/null 2>&1 <<'PYTHON'
import importlib.util
import sys

names = "megatron.core megatron.training torch emerging_optimizers psutil tqdm matplotlib pytest ruff mypy megatron_asyncpp"
sys.exit(any(importlib.util.find_spec(name) is None for name in names.split()))
PYTHON
}

# pip install with its output in a log, and a line every few seconds that shows that it lives.
# A subshell, so that the trap is its own. The ticker ends with it, or by itself if this script is killed.
install_into_venv() (
  log=$venv/install.log
  (
    began=$SECONDS
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
      printf '  %4d s  %.90s\n' $((SECONDS - began)) "$(grep -v WARNING "$log" | tail -n 1)" >&2
    done
  ) </dev/null &
  trap 'kill '$!' 2>/dev/null || true' EXIT
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    -e "${root}[plots,test]" </dev/null >"$log" 2>&1; then
    say "pip could not install; the end of its output ($log has all of it):"
    tail -n 15 "$log" >&2
    return 1
  fi
)

# Makes .venv, or completes it, or does nothing if it is complete.
# The key covers what is to be installed and where: an environment that was moved points to its old place.
prepare_venv() {
  local key python
  key=$(printf '%s\n' "$root" | cat - "$root/setup.py" | cksum)
  if [[ -f $stamp && ! -e $unfinished && $(<"$stamp") == "$key" ]] && venv_has_all; then
    return
  fi
  rm -rf "$venv.old"
  # pip trusts what a killed pip left behind, so a half-made environment can only be made anew. One that pip finished
  # (for another setup.py), or that somebody else made, is completed instead.
  if [[ -e $venv ]] && { [[ -e $unfinished || $(cat "$stamp" 2>/dev/null) == "$key" ]] ||
    ! python_answers "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    say "$venv is incomplete: making it anew."
    mv "$venv" "$venv.old" # at once, so that a removal that is cut short can't pass for an environment
    rm -rf "$venv.old"
  fi
  if [[ ! -e $venv ]]; then
    python=$(find_python)
    say "Making $venv with $python."
    mkdir "$venv"
    touch "$unfinished"
    "$python" -m venv "$venv"
  fi
  touch "$unfinished"
  rm -f "$stamp"
  say "Installing into $venv: torch and Megatron with what they need, about 6 GB, some minutes the first time."
  install_into_venv
  if ! venv_has_all; then
    say "pip reported success, but $venv still lacks a package: remove it, and call this again."
    return 1
  fi
  printf '%s' "$key" >"$stamp"
  rm "$unfinished"
  say "Installed."
}
