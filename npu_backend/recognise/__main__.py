"""`python -m npu_backend.recognise`: what the installed transformers names like an operator, without a known form.

One line per form, the most frequent first: digest, number of families, operator that the name promises, examples.
"""

from __future__ import annotations

from collections import defaultdict

from npu_backend import recognise


def main() -> None:
    unknown: dict[tuple[str, str], list[str]] = defaultdict(list)
    for family in recognise.families():
        for found in recognise.operators(family):
            if not found.variant:
                unknown[found.form, found.op].append(found.target)
    for (form, op), targets in sorted(unknown.items(), key=lambda item: -len(item[1])):
        print(form, len(targets), op, *(target.rpartition("modeling_")[2] for target in targets[:4]))


if __name__ == "__main__":
    main()
