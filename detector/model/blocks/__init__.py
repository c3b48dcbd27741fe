"""The blocks that networks are built of. All take and return (B, channels, height, width).

Members carry the names of the public checkpoints (`conv`, `bn`, `cv1`, `m`, ...): weights are exchanged by name. The
parameters of a block's `__init__` are what a model description writes, in its order; `inputs` and `repeats` are put in
by who builds it (layers.py). A block that changes the size of its map says by how much: `stride`.
Every block works in either memory format; none copies a channels_last input to rearrange it.
"""
