"""Values that go through a pipe, and their arrays through memory that both sides share."""

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

ALIGNMENT = 64  # bytes


class Packed(NamedTuple):
    """A pickled batch whose arrays lie elsewhere: in the slot, from byte to byte, or here where it is full."""

    content: bytes
    arrays: list[tuple[int, int] | bytes]


class _Pickler(pickle.Pickler):
    """Leaves arrays out of the stream, those of tensors too."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, torch.Tensor) else NotImplemented


def pack(value: Any, slot: memoryview) -> Packed:
    """A value that is to be read elsewhere. Those of its arrays that lie in the slot already stay where they are."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    arrays: list[tuple[int, int] | bytes] = []
    raws = [buffer.raw() for buffer in buffers]
    spans = [_span(raw, slot) for raw in raws]
    start = _aligned(max((stop for _, stop in filter(None, spans)), default=0))
    for raw, span in zip(raws, spans, strict=True):
        stop = start + raw.nbytes
        if span:
            arrays.append(span)
        elif stop > len(slot):
            arrays.append(bytes(raw))
        else:
            slot[start:stop] = raw
            arrays.append((start, stop))
            start = _aligned(stop)
    return Packed(stream.getvalue(), arrays)


def _aligned(byte: int) -> int:
    return -(-byte // ALIGNMENT) * ALIGNMENT


def _span(raw: memoryview, slot: memoryview) -> tuple[int, int] | None:
    """From which byte of the slot to which these bytes are, if they are part of it."""
    if not raw.nbytes or not slot.nbytes:
        return None
    start = _address(raw) - _address(slot)
    return (start, start + raw.nbytes) if 0 <= start <= len(slot) - raw.nbytes else None


def unpack(packed: Packed, slot: memoryview) -> Any:
    """The value; its arrays are views of the slot."""
    buffers = [bytearray(one) if isinstance(one, bytes) else slot[one[0] : one[1]] for one in packed.arrays]
    return pickle.loads(packed.content, buffers=buffers)


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data
