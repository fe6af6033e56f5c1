"""Python's own start-up hook, put on PYTHONPATH by `npu-backend run --virtual-npu`.

It arranges that the first `import torch` (or torch_npu) of this process finds virtual NPUs, and then runs the
sitecustomize that this one hides, if there is one. Processes that never import torch pay nothing. Standard library
only: any Python that the command starts may read this file, also one without npu_backend.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _ActivateOnImport:
    """A finder that finds nothing: it is asked about torch just before torch is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ("torch", "torch_npu"):
            sys.meta_path.remove(self)
            try:
                from npu_backend.virtual_npu.launch import activate_inherited
            except ModuleNotFoundError:  # a checkout, or another environment's Python: our own copy comes last
                sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
                from npu_backend.virtual_npu.launch import activate_inherited
            activate_inherited()


def _run_hidden_sitecustomize() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("NPU_BACKEND_VIRTUAL_NPU"):
    sys.meta_path.insert(0, _ActivateOnImport())
_run_hidden_sitecustomize()
