"""Checks of versions: the pair torch and torch-npu, declared requirements, releases known to be bad, the matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from npu_backend.doctor import matrix as tested
from npu_backend.doctor.checks.devices import family
from npu_backend.doctor.checks.packages import install, pip
from npu_backend.doctor.facts import Facts
from npu_backend.doctor.packages import base, canonical, parse
from npu_backend.doctor.report import Finding
from npu_backend.patches.liger import TRITON_ASCEND

# What no installation may move; a requirement on one of these that does not hold is a finding.
_HELD = ("torch", "torch-npu", "torchvision", "torchaudio", "triton", "triton-ascend", "transformers")


def torch_pair(facts: Facts) -> Iterator[Finding]:
    """torch and torch-npu that do not belong together: `undefined symbol` when torch is imported."""
    torch, torch_npu = facts.versions.get("torch", ""), facts.versions.get("torch-npu", "")
    if not torch_npu:
        return
    if not torch:
        message = f"torch-npu {torch_npu} is installed, torch is not"
    elif base(torch) != base(torch_npu):
        message = f"torch-npu {torch_npu} is built for torch {base(torch_npu)}, but torch {torch} is installed"
    else:
        return
    fix = pip(facts, f"install --no-deps torch=={base(torch_npu)}")
    if torch:
        fix += "\nor keep this torch, and install the torch-npu of the same number"
    fix += "\non x86_64 take torch from https://download.pytorch.org/whl/cpu"
    yield Finding("torch_pair", "error", message, fix, "https://github.com/sgl-project/sglang/issues/28628")


def requirements(facts: Facts) -> Iterator[Finding]:
    """Requirements of installed packages on torch, torch-npu, triton or transformers that a later install broke."""
    for package in (copies[0] for copies in facts.packages.values()):
        for requirement in package.requires:
            name = canonical(requirement.name)
            version = facts.versions.get(name, "")
            parsed = parse(version)
            if name not in _HELD or parsed is None or requirement.specifier.contains(parsed.public, prereleases=True):
                continue
            if name == "triton" and "triton-ascend" in facts.packages:
                continue  # triton_owner looks at these two
            yield Finding(
                "requirements",
                "warning",
                f"{package} requires {name}{requirement.specifier}, but {name} {version} is installed",
                f"install the {package.name} of this {name}, with --no-deps and the versions of one row of "
                "`npu-backend doctor --matrix`; never move torch, torch-npu or vllm alone",
                "https://github.com/verl-project/verl/pull/4141",
            )


def liger_triton(facts: Facts) -> Iterator[Finding]:
    """A liger-kernel without any triton: `use_liger` is refused."""
    if "liger-kernel" not in facts.packages or "triton" in facts.modules:
        return
    for_npu = install(facts, "triton-ascend", TRITON_ASCEND)
    fix = for_npu if facts.ascend else f"on an NPU: {for_npu}\non CUDA: {pip(facts, 'install --no-deps triton')}"
    if family(facts.chip).startswith("310"):
        fix = f"keep use_liger=False: triton-ascend does not compile for {facts.chip}"
    yield Finding(
        "liger_triton",
        "warning",
        f"{facts.packages['liger-kernel'][0]} is installed, but no triton: use_liger=True is an error here",
        fix,
        "https://github.com/linkedin/Liger-Kernel/blob/main/setup.py",
    )


def known_bad(facts: Facts) -> Iterator[Finding]:
    """Releases, and pairs of releases, that are known to be bad."""
    for bad in tested.known_bad():
        if bad.matches(facts.versions):
            other = f" with {bad.other} {facts.versions[bad.other]}" if bad.other else ""
            message = f"{bad.package} {facts.versions[bad.package]}{other} {bad.why}"
            fix = pip(facts, bad.fix.removeprefix("pip ")) if bad.fix.startswith("pip ") else bad.fix
            yield Finding("known_bad", bad.severity, message, fix, bad.source)


def matrix(facts: Facts) -> Iterator[Finding]:
    """Versions that nobody published as tested together; the nearest tested row is shown."""
    versions = {name: version for name, version in facts.versions.items() if name in tested.COLUMNS}
    if facts.ascend:
        for group in tested.GROUPS:
            together = {name: versions[name] for name in group if name in versions}
            if len(together) > 1 and tested.tested(together) is None:
                yield _untested(together, versions)
    transformers = versions.get("transformers", "")
    known = tested.tested_versions("transformers")
    if transformers and not any(tested.same(transformers, version) for version in known):
        yield _untested_transformers(transformers, versions)


def _untested(together: Mapping[str, str], versions: Mapping[str, str]) -> Finding:
    row = tested.nearest(together, versions)
    other = ", ".join(f"{name} {row.versions.get(name, '(not stated)')}" for name in row.differences(together))
    return Finding(
        "matrix",
        "warning",
        f"untested: {_list(together)}; nearest tested row: {row.name}, which has {other} (all of it: "
        f"{_list(row.versions)}; tested by {row.tested_by})",
        "prefer the image or the versions of that row, all of them together; or run `npu-backend verify` on this host "
        "before you train",
        row.source,
    )


def _untested_transformers(version: str, versions: Mapping[str, str]) -> Finding:
    """A note: only code that is recognised is replaced, and `verify` settles the rest. An unreadable version is not."""
    row = tested.nearest({"transformers": version}, versions)
    return Finding(
        "matrix",
        "note" if parse(version) else "warning",
        f"untested: transformers {version}; nearest tested row: {row.name}, which has transformers "
        f"{row.versions.get('transformers', '(not stated)')}. Model code that is the same in both is patched, code "
        "that is not recognised is left as it is (`npu-backend plan` shows which)",
        "none needed where `npu-backend verify --model-type NAME` passes: it compares patched and unpatched here",
        row.source,
    )


def _list(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
