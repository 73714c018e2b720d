"""Attention that checks itself. It finds silent errors in the GEMMs of attention while training goes on, and repairs
them if it can. If it cannot, the slot is computed again.

The training step and the checked modules call `guard`. `linear` and `product` check projections, `explicit` and
`checksums` check attention as matrices, `fused` and `identities` check a stock kernel. `operators` is `linear` and
`fused` for a compiled graph. `roundoff` says how far a correct result may be from its checksum.

It needs neither distributed nor torchtitan. `everstep.titan.attention` puts it into torchtitan.
"""
