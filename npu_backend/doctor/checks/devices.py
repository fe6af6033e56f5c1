"""Checks of the driver, the devices that a process sees, and the chip that the image is built for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from npu_backend.doctor.checks.packages import pip
from npu_backend.doctor.facts import DRIVER, HAL, MANAGERS, Facts, python_version
from npu_backend.doctor.report import Finding

_MOUNTS = "https://github.com/gpustack/gpustack/issues/1378"
_VISIBLE = "https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0028.html"
# Family, by which the tags of images are named -> what its chips are called by CANN and npu-smi
_FAMILIES = {
    "310p": r"310p",
    "310b": r"310b",
    "910b": r"910b",
    "a3": r"910_93|910c?$",  # npu-smi calls an A3 chip just Ascend910
    "950": r"950|910_95",
    "910a": r"910(a|pro)",
}


def driver(facts: Facts) -> Iterator[Finding]:
    """Device nodes, driver files or npu-smi that are not mounted into this container; the missing mounts are listed."""
    if not facts.ascend:
        return
    devices = [] if facts.devices else ["/dev/davinci0"]
    devices += [node for node in MANAGERS if not facts.host.exists(node)]
    volumes = [] if facts.hal_folders else [DRIVER]
    files = [] if facts.npu_smi else ["/usr/local/bin/npu-smi"]
    files += [path for path in ("/usr/local/dcmi", "/etc/ascend_install.info") if not facts.host.exists(path)]
    if devices or volumes:
        what = "; ".join(
            filter(
                None,
                [
                    f"driver not mounted: no {HAL} in {DRIVER}, so torch_npu cannot be imported" if volumes else "",
                    f"missing devices: {', '.join(devices)}" if devices else "",
                    f"missing files: {', '.join(files)}" if files else "",
                ],
            )
        )
        mounts = [f"--device {node}" for node in devices] + [f"-v {path}:{path}" for path in volumes + files]
        yield Finding(
            "driver",
            "error",
            f"this host has {facts.ascend}, but {what}",
            f"start the container with {' '.join(mounts)} (one --device per NPU), on a host with the Ascend driver\n"
            "without an NPU: npu-backend run --virtual-npu -- COMMAND",
            _MOUNTS,
        )
    elif files:
        mounts = [f"-v {path}:{path}" for path in files]
        yield Finding("driver", "note", f"not mounted: {', '.join(files)}", f"add {' '.join(mounts)}", _MOUNTS)
    if facts.hal_folders and not _loadable(facts):
        folders = [folder for folder in facts.hal_folders if folder.startswith(DRIVER)]
        yield Finding(
            "driver",
            "error",
            f"{HAL} is in {folders[0]}, which neither LD_LIBRARY_PATH nor /etc/ld.so.conf.d names",
            f"export LD_LIBRARY_PATH={DRIVER}/lib64/driver:{DRIVER}/lib64/common:$LD_LIBRARY_PATH",
            "https://github.com/vllm-project/vllm-ascend/issues/661",
        )


def visible_devices(facts: Facts) -> Iterator[Finding]:
    """ASCEND_RT_VISIBLE_DEVICES and its like: what they hide, and values that CANN reads otherwise than meant."""
    if not facts.ascend:
        return
    name = "ASCEND_RT_VISIBLE_DEVICES"
    value = facts.environ.get(name)
    if value is not None:
        wrong, severity = _misread(value, len(facts.devices)), "error"
        if wrong:
            count = len(facts.devices) or 8
            fix = f"unset {name}\nor export {name}={','.join(map(str, range(min(count, 8))))}"
            yield Finding("visible_devices", severity, f"{name}={value!r}: {wrong}", fix, _VISIBLE)
    index = facts.environ.get("ASCEND_DEVICE_ID", "")
    if value and index.isdecimal() and int(index) >= len(value.split(",")):
        yield Finding(
            "visible_devices",
            "error",
            f"ASCEND_DEVICE_ID={index} is an index into {name}={value!r}, which has {len(value.split(','))}",
            "unset ASCEND_DEVICE_ID",
            _VISIBLE,
        )
    if facts.environ.get("CUDA_VISIBLE_DEVICES") is not None and value is None:
        yield Finding(
            "visible_devices",
            "note",
            f"CUDA_VISIBLE_DEVICES={facts.environ['CUDA_VISIBLE_DEVICES']!r} hides no NPU",
            f"set {name} instead",
        )
    if facts.environ.get("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"):
        yield Finding(
            "visible_devices",
            "note",
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES is set: Ray's workers all see the same devices, and each "
            "has to choose its own",
            "nothing where the framework chooses (verl does); else unset it",
        )


def image(facts: Facts) -> Iterator[Finding]:
    """An image built for another chip than this host has; the right tag is named."""
    chip = family(facts.chip)
    if not chip or not facts.ascend:
        return
    built = {name: family(name, kernel=True) for name in facts.kernels}
    variable = facts.environ.get("SOC_VERSION", "")
    if variable and family(variable):
        built[f"SOC_VERSION={variable}"] = family(variable)
    other = {name: of for name, of in built.items() if of and of != chip}
    if other and chip not in {of for name, of in built.items() if not name.startswith("SOC_VERSION")}:
        python = python_version().rpartition(".")[0]
        version = facts.toolkit.version.lower() if facts.toolkit and facts.toolkit.version else "<version>"
        yield Finding(
            "image",
            "error",
            f"this host's chip is {facts.chip}, but the image is for {', '.join(other)}: operators end with error "
            "561103, or 'the socversion of bin package does not match'",
            f"start the image whose tag says {chip}: cann:{version}-{chip}-<system>-py{python}, or one built on it",
            "https://github.com/hiyouga/LlamaFactory/issues/10418",
        )
    elif other:
        yield Finding(
            "image",
            "warning",
            f"SOC_VERSION={variable} is not this host's chip, {facts.chip}: extensions are compiled for the wrong one",
            f"export SOC_VERSION=ascend{facts.chip.lower()}",
        )
    if chip.startswith("310") and "triton-ascend" in facts.packages:
        yield Finding(
            "image",
            "warning",
            f"triton-ascend is installed, but it does not compile for {facts.chip}",
            pip(facts, "uninstall -y triton-ascend") + "\nand keep to patch set verl_npu and impl_backend torch",
            "https://github.com/vllm-project/vllm-ascend/pull/7238",
        )


def family(name: str, *, kernel: bool = False) -> str:
    """The family of a chip (`910B3`, `Ascend310P3`) or of a folder of kernels (`ascend910` is an old 910A there)."""
    text = name.lower().removeprefix("ascend")
    if kernel and text == "910":
        return "910a"
    return next((of for of, pattern in _FAMILIES.items() if re.match(pattern, text)), "")


def _misread(value: str, count: int) -> str:
    """What CANN makes of a list of devices where that is not what was meant; "" if it is."""
    if not value.strip():
        return "every device is hidden, torch.npu.is_available() is False (Ray sets it so in tasks without an NPU)"
    read = re.match(r"[0-9,]*", value)
    kept = read[0] if read else ""
    if kept != value:
        return f"only digits and commas are read, what follows them is dropped: {kept!r} is left"
    numbers = [int(number[:9]) for number in kept.split(",") if number]
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        return "device numbers must rise; with these torch.npu.device_count() is 0"
    beyond = [number for number in numbers if number >= count]
    if count and beyond:
        return f"there is no device {beyond[0]} here ({count} devices, counted from 0); it and all after it are dropped"
    return ""


def _loadable(facts: Facts) -> bool:
    """Whether the loader looks where the driver's library is."""
    configured = "\n".join(
        facts.host.read(f"/etc/ld.so.conf.d/{name}") for name in facts.host.entries("/etc/ld.so.conf.d")
    )
    known = {line.strip().rstrip("/") for line in configured.splitlines()} | set(facts.library_path)
    return any(folder in known or not folder.startswith(DRIVER) for folder in facts.hal_folders)
