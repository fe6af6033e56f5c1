"""The four operators that the set `verl_npu` puts into transformers, each on top of one torch_npu call or a few.

Every operator file says what it replaces and when it may, and holds: the table-level predicate `requires` (is the
operator in this torch_npu, does the model fit), the factories that build a replacement with exactly the original's
signature, the predicate that sends single inputs back to the original forward, the torch_npu call, and its eager
reference.

    checks.py    what all of them ask of torch_npu, of an input, and of the original's signature
    sharded.py   DTensor activations: compute on the local shard, give back the same placements
    counters.py  how often each operator ran, and why it did not

Nothing here looks at a version string: the schema of an operator and the structure of a class decide.
"""
