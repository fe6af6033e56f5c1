"""Which objects of other packages are replaced, by what, and why.

`engine.py` knows how to plan, apply and revert; every other file here is one patch set: a table of records.
The folder stands at the top of the repository and is installed as `npu_backend.patches`.
"""

if __name__ != "npu_backend.patches":  # a second copy would keep a second ledger
    raise ImportError(f"import this package as 'npu_backend.patches', not {__name__!r}")
