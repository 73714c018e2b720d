"""Attention that checks itself: silent errors in the GEMMs of attention are found while training goes on,
repaired where they can be, and otherwise make the slot be computed again.

`guard` is what a checked module and the training step talk to. `linear` and `product` check projections, `explicit` and
`checksums` attention as matrices, `fused` and `identities` a stock kernel, `operators` all of them in a compiled graph;
`roundoff` says how far a correct result may be from its checksum.

It works on any PyTorch >= 2.11, without distributed and without torchtitan, which `everstep.titan.attention` knows.
"""
