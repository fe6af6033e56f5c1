"""What is made of the compiler's answers, with a stand-in that gives them."""

from __future__ import annotations

import os

import pytest

from npu_backend.ascend import vendor
from npu_backend.ascend.verdict import Verdict

MODULE = """module attributes {"UB_SIZE", 1572864 : i32, hivm.module_core_type = #hivm.module_core_type<AIV>} {
  func.func @kernel() {
    %c64_i64 = arith.constant 64 : i64
    %0 = hivm.hir.pointer_cast(%c64_i64) : memref<8x16xbf16, #hivm.address_space<ub>>
  }
  func.func @other() {
    %c64_i64 = arith.constant 128 : i64
    %0 = hivm.hir.pointer_cast(%c64_i64) : memref<f32, #hivm.address_space<ub>>
  }
}"""


@pytest.fixture
def answer(tmp_path):
    """Compile with a compiler that runs these lines of shell."""

    def run(*lines: str) -> Verdict:
        program = tmp_path / "bishengir-compile"
        program.write_text("\n".join(["#!/bin/sh", *lines]))
        program.chmod(0o755)
        (tmp_path / "module.mlir").write_text(MODULE)
        path = f"{vendor.stand_in_folder()}{os.pathsep}{os.environ['PATH']}"
        command = [str(program), "in.mlir", "--target=Ascend910B1", "-o", "out"]
        return vendor.compile_repeatedly(command, "", {"PATH": path, "HERE": str(tmp_path)})

    return run


def test_a_module_that_reached_the_last_stage_is_ok(answer):
    found = answer('hivmc "$HERE/module.mlir" -o out')
    assert found == Verdict("ok", use={"UB": 64 * 8 + 128 * 16}, capacity={"UB": 1572864}, ping_pong="none", core="AIV")


def test_success_without_the_last_stage_is_not_ok(answer):
    assert answer("exit 0").status == "unsupported"


def test_the_last_stages_version_can_be_asked(answer):
    found = answer("hivmc --version >&2", "hivmc-a5 --version >&2", "exit 3")
    assert found.message.startswith("bishengir-compile ended with 3: hivmc 1.2.0 (")


def test_cann_may_run_its_own_last_stage(answer):
    assert answer('for last in "$@"; do :; done', 'touch "$last.o"').status == "ok"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("error: ub overflow, requires 8577280 bits while 1572864 bits available! (x)", ("UB", 8577280, 1572864)),
        (
            "error: UB overflow, requires at least 4243456 bits; 2031616 bits available",
            ("UB", 4243456, 2031616),
        ),
        ("error: cc overflow, requires 2097152 bits while 1048576 bits available!", ("L0C", 2097152, 1048576)),
        ("error: cbuf overflow, requires 8388608 bits while 4194304 bits available!", ("L1", 8388608, 4194304)),
    ],
)
def test_an_overflow_says_which_memory_how_much_and_how_much_there_is(answer, text, expected):
    found = answer(f"echo '{text}' >&2", "exit 1")
    assert (found.status, found.runs) == ("overflow", 3)
    assert (found.scope, found.need, found.available) == expected


def test_a_compiler_that_changes_its_mind_is_unstable(answer):
    found = answer(
        'echo >> "$HERE/calls"',
        '[ "$(wc -l < "$HERE/calls")" = 2 ] && exec hivmc "$HERE/module.mlir"',
        "echo 'error: ub overflow, requires 1689600 bits while 1572864 bits available!' >&2; exit 1",
    )
    assert found.status == "unstable"
    assert found.message == "UB overflow: needs 1689600 of 1572864 bits / ok"
    assert found.runs == 3


def test_errors_are_reported_in_the_compilers_words_once(answer):
    lines = ["error: no such op", "error: no such op", "error: Failed to run BiShengHIR pipeline"]
    found = answer(*(f"echo '{line}'" for line in lines), "exit 1")
    assert (found.status, found.message) == ("unsupported", "bishengir-compile ended with 1: no such op")


def test_a_crash_is_named_as_one(answer):
    found = answer("echo 'Stack dump:'", "kill -6 $$")
    assert found.message == "bishengir-compile crashed (signal 6): Stack dump:"


def test_a_compiler_that_hangs_is_stopped(answer, monkeypatch):
    monkeypatch.setattr(vendor, "TIMEOUT", 0.2)
    assert "has not ended" in answer("exec sleep 20").message
