"""Hand-written forward and backward passes for a CPU, one pair a file; the plain versions are their oracles.

They compute what `layers`, `moe` and `transformer` define, in float32 or float64, with fewer passes over memory; a
function has the name and the arguments of its plain version. docs/performance.md holds what each of them gains. No pass
can be differentiated twice: torch says so. Not for: autocast (they write into buffers of the input's dtype), GPUs.
"""
