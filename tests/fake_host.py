"""A host for doctor made of files in a temporary folder. `healthy` is an Ascend host without a fault; a test breaks one
thing in it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from npu_backend import doctor
from npu_backend.doctor.host import Host, Output

CANN = "/usr/local/Ascend/cann-9.1.0"
SMI = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     {chip:<20}| OK            | 93.5        45                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3364 / 65536         |
+===========================+===============+====================================================+
"""


class FakeHost:
    """A root folder, a site-packages folder, variables, and what commands print."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.site = folder / "site-packages"
        self.path = [str(self.site)]
        self.environ: dict[str, str] = {"HOME": "/root"}
        self.outputs: dict[str, Output] = {}
        self.commands: list[list[str]] = []
        self.root.mkdir(parents=True)
        self.site.mkdir()

    def file(self, path: str, text: str = "") -> Path:
        """A file of the host."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def remove(self, path: str) -> None:
        """Take a file of the host away."""
        (self.root / path.lstrip("/")).unlink()

    def link(self, path: str, target: str) -> None:
        """A link of the host; `target` is relative."""
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def toolkit(self, folder: str, version: str, kernels: Sequence[str] = ("ascend910b",)) -> None:
        """An installed CANN."""
        self.file(f"{folder}/set_env.sh")
        self.file(f"{folder}/aarch64-linux/ascend_toolkit_install.info", f"package_name=toolkit\nversion={version}\n")
        for kernel in kernels:
            self.file(f"{folder}/opp/built-in/op_impl/ai_core/tbe/kernel/{kernel}/add/Add.o")

    def package(
        self, name: str, version: str, files: Mapping[str, str] | None = None, requires: Sequence[str] = ()
    ) -> Path:
        """Install a distribution as pip does: over whatever is there. Returns its metadata folder."""
        for old in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            (old / "METADATA").unlink()
            (old / "RECORD").unlink()
            old.rmdir()
        record = []
        for path, text in (files or {f"{name.replace('-', '_')}/__init__.py": f"# {name} {version}\n"}).items():
            file = self.site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(text)}\n")
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(header + "".join(f"Requires-Dist: {r}\n" for r in requires) + "\ntext\n")
        (info / "RECORD").write_text("".join(record))
        return info

    def host(self) -> Host:
        """What doctor examines."""
        return Host(self.root, self.environ, self.path, self._execute, "python")

    def findings(self, check: str | None = None, *, probes: bool = False) -> list[doctor.Finding]:
        """All findings, or those of one check; every finding must be complete."""
        report = doctor.examine(self.host(), probes=probes)
        for finding in report.findings:
            assert finding.message
            assert finding.fix
            assert "the check itself failed" not in finding.message
        assert check is None or check in report.checks
        return [finding for finding in report.findings if check in (None, finding.check)]

    def _execute(self, command: Sequence[str], environ: Mapping[str, str], seconds: float) -> Output:
        self.commands.append(list(command))
        assert seconds > 0
        return next((out for name, out in self.outputs.items() if name in " ".join(command)), Output(0, ""))


def triton_files(backend: str, text: str = "") -> dict[str, str]:
    """What a triton for one backend installs."""
    return {
        "triton/__init__.py": f"# {backend}{text}\n",
        "triton/compiler.py": f"# compiler of {backend}{text}\n",
        "triton/backends/__init__.py": "",
        f"triton/backends/{backend}/driver.py": f"# {backend}\n",
    }


def healthy(folder: Path) -> FakeHost:
    """Eight 910B3, their driver, CANN 9.1.0 and the packages of the newest row of the matrix."""
    fake = FakeHost(folder)
    for node in (*(f"davinci{i}" for i in range(8)), "davinci_manager", "devmm_svm", "hisi_hdc"):
        fake.file(f"/dev/{node}")
    fake.file("/usr/local/Ascend/driver/version.info", "Version=25.5.0\n")
    fake.file("/usr/local/Ascend/driver/lib64/driver/libascend_hal.so")
    for path in ("/usr/local/bin/npu-smi", "/usr/local/dcmi/libdcmi.so", "/etc/ascend_install.info"):
        fake.file(path)
    fake.toolkit(CANN, "9.1.0")
    fake.link("/usr/local/Ascend/cann", "cann-9.1.0")
    fake.environ |= {
        "ASCEND_HOME_PATH": CANN,
        "ASCEND_TOOLKIT_HOME": CANN,
        "ASCEND_OPP_PATH": f"{CANN}/opp",
        "LD_LIBRARY_PATH": f"{CANN}/lib64:/usr/local/Ascend/driver/lib64/driver",
    }
    fake.outputs = {
        "npu-smi": Output(0, SMI.format(chip="910B3")),
        "torch_npu": Output(0, "devices: 8 Ascend910B3\n"),
    }
    fake.package("torch", "2.10.0+cpu")
    fake.package("torch-npu", "2.10.0.post4", requires=["torch==2.10.0"])
    fake.package("triton-ascend", "3.2.2", triton_files("ascend"))
    fake.package("transformers", "5.10.4")
    fake.package("liger-kernel", "0.8.5", requires=["triton>=2.3.1", "torch>=2.1.2"])
    return fake
