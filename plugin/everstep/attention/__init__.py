"""Attention that checks itself: silent errors in the GEMMs of attention are found while training goes on,
repaired where they can be, and otherwise make the slot be computed again.

    section.py      [attention_check], as a user reads it
    roundoff.py     how far a correct result may be from its checksum
    checksums.py    encode, verify, locate, correct: pure functions over tensors (ATTNChecker, arXiv
    2410.11720) product.py      one matrix product, checked and repaired linear.py       the projections,
    forward and backward masks.py        who sees whom, as blocks explicit.py     attention as matrices, every
    product checked both ways identities.py   what a fused kernel's inputs and outputs must satisfy fused.py
    a stock kernel, watched through the identities guard.py        what one module asks before, and tells
    after, a check findings.py     what was seen in a slot: events, refusal, leaving schedule.py     how often
    each section is checked injection.py    faults on purpose override.py     the only file that knows
    torchtitan

Everything but override.py works on any PyTorch >= 2.11, without torchtitan and without distributed.
"""
