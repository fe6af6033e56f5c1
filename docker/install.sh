#!/bin/sh
# The steps that make an Ascend host of a Python with CANN: a layer each in docker/Dockerfile.template, one after the
# other in continuous integration (`all`). Versions come from the constraints file alone, which lies beside this script
# or is named by $PIP_CONSTRAINT. pip's own settings (a mirror, a folder of wheels) apply.
#
#   sh install.sh torch|stack|vllm|triton|operators torch_npu or liger|npu-backend SOURCE|check
#   sh install.sh all torch_npu or liger SOURCE
#
#   PYTHON               the Python to install into             (default: python3)
#   TORCH_INDEX          where x86_64 finds torch without CUDA  (default: PyTorch's CPU index)
#   TRITON_ASCEND_INDEX  where triton-ascend after 3.2.0 is     (default: the vendor's index)
set -eu

here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "${PYTHON:-python3}") || { echo "install.sh: there is no ${PYTHON:-python3}" >&2; exit 2; }
case "$python" in /*) ;; *) python=$PWD/$python ;; esac
torch_index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
triton_ascend_index=${TRITON_ASCEND_INDEX-https://triton-ascend.osinfra.cn/pypi/simple/}
export PIP_CONSTRAINT="${PIP_CONSTRAINT:-$here/constraints.txt}"
export PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export PIP_BREAK_SYSTEM_PACKAGES=1  # Debian's Python refuses otherwise; a container has no other use for it

pip() { "$python" -m pip "$@"; }
pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$PIP_CONSTRAINT" | head -n 1; }
extra_index() { [ -z "$1" ] || printf '%s' "--extra-index-url=$1"; }

torch() {
    # torch-npu on x86_64 asks for the build of torch without CUDA; elsewhere every build is one.
    local_version=""
    [ "$(uname -m)" != x86_64 ] || local_version="+cpu"
    # shellcheck disable=SC2046  # no argument at all where there is no index
    pip install $(extra_index "$torch_index") "torch==$(pin torch)$local_version" numpy
    pip install --no-deps torch-npu
}

stack() {
    pip install transformers verl
}

vllm() {
    # vLLM's wheels are for CUDA; its source, for no device at all, is what vllm-ascend builds on.
    # shellcheck disable=SC2046
    VLLM_TARGET_DEVICE=empty pip install --no-binary vllm $(extra_index "$torch_index") vllm
    # shellcheck disable=SC2046
    pip install $(extra_index "$torch_index") $(extra_index "$triton_ascend_index") vllm-ascend
}

triton() {
    # Last of what brings a triton: two distributions write into one folder, and removing either takes files of both.
    pip uninstall --yes --quiet triton triton-ascend
    [ -n "$(pin triton-ascend)" ] || return 0
    # shellcheck disable=SC2046
    pip install --no-deps $(extra_index "$triton_ascend_index") triton-ascend
}

operators() {
    case "$1" in
    torch_npu) ;;
    liger)
        [ -n "$(pin liger-kernel)" ] || { echo "install.sh: this row has no tested liger-kernel; OPERATORS=torch_npu" >&2; exit 2; }
        pip install --no-deps liger-kernel
        ;;
    *) echo "install.sh: OPERATORS is torch_npu or liger, not '$1'" >&2; exit 2 ;;
    esac
}

npu_backend() {
    pip install --no-deps "$1"
}

check() {
    cd /  # what was installed is checked, not a checkout that happens to be the current folder
    "$here/entrypoint.sh" "$python" "$here/smoke.py" "$PIP_CONSTRAINT"
    "$here/entrypoint.sh" "$python" -m npu_backend doctor --image
}

case "${1:-}" in
torch | stack | vllm | triton | check) "$1" ;;
operators) operators "$2" ;;
npu-backend) npu_backend "$2" ;;
all)
    torch
    stack
    [ -z "$(pin vllm-ascend)" ] || vllm
    triton
    operators "$2"
    npu_backend "$3"
    check
    ;;
*) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
