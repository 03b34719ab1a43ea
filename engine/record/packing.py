"""How numbers become few bytes: whole steps, differences in time and between GPUs, bytes of one weight together."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from engine.record.schema import NOTHING, Floats, Shorts

LEVEL = 6


def whole(values: Floats, step: Floats | float) -> Shorts:
    """Values in whole steps; NaN becomes NOTHING."""
    scaled = np.clip(np.round(values / step), NOTHING + 1, 32767)
    return np.where(np.isnan(scaled), NOTHING, scaled).astype(np.int16)


def values(whole: Shorts, step: float) -> Floats:
    """What `whole` was made from, to half a step."""
    return np.where(whole == NOTHING, np.nan, whole * step)


def packed(whole: Shorts) -> bytes:
    """(tick, GPU). The first tick as differences from GPU to GPU, the others from tick to tick; they wrap, and back."""
    steps = np.empty_like(whole)
    steps[:1] = np.diff(whole[:1], axis=1, prepend=np.zeros((1, 1), np.int16))
    steps[1:] = np.diff(whole, axis=0)
    return _squeezed(steps)


def unpacked(data: bytes, ticks: int) -> Shorts:
    """What `packed` was given."""
    steps = _spread(data).reshape(ticks, -1).copy()
    steps[0] = np.cumsum(steps[0], dtype=np.int16)
    return np.cumsum(steps, axis=0, dtype=np.int16)


def raw(whole: Shorts) -> bytes:
    """Quick, for what is kept for a minute only."""
    return zlib.compress(np.ascontiguousarray(whole).tobytes(), 1)


def unraw(data: bytes, shape: tuple[int, ...]) -> Shorts:
    return np.frombuffer(zlib.decompress(data), np.int16).reshape(shape)


def thinned(whole: Shorts, bins: npt.NDArray[np.int64]) -> Shorts:
    """(3, bin, GPU): the mean of each bin, and how far its least and its largest value lie from it. `bins` numbers the
    bin of each tick, 0 first, none left out."""
    known = whole != NOTHING
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    count = np.add.reduceat(known, starts, axis=0)
    total = np.add.reduceat(np.where(known, whole, 0).astype(np.int64), starts, axis=0)
    mean = np.round(total / np.maximum(count, 1)).astype(np.int64)
    least = np.minimum.reduceat(np.where(known, whole, 32767), starts, axis=0)
    most = np.maximum.reduceat(whole, starts, axis=0)
    there = count > 0
    out = np.where(there, np.stack([mean, mean - least, most - mean]), np.array([NOTHING, 0, 0])[:, None, None])
    return np.clip(out, NOTHING, 32767).astype(np.int16)


def packed_thin(thin: Shorts) -> bytes:
    """(3, bin, GPU): the means as `packed`, the distances as they are, for they are small."""
    means = packed(thin[0])
    return len(means).to_bytes(4, "little") + means + _squeezed(thin[1:].reshape(-1, thin.shape[2]))


def unpacked_thin(data: bytes, bins: int) -> tuple[Shorts, Shorts, Shorts]:
    """Means, least and largest values, each (bin, GPU)."""
    cut = 4 + int.from_bytes(data[:4], "little")
    mean = unpacked(data[4:cut], bins)
    below, above = _spread(data[cut:]).reshape(2, bins, -1)
    nothing = mean == NOTHING
    least, most = (np.where(nothing, NOTHING, mean + d).astype(np.int16) for d in (-below, above))
    return mean, least, most


def _squeezed(steps: Shorts) -> bytes:
    """Small numbers of either sign as small ones without, then all low bytes before all high ones."""
    wide = steps.astype(np.int32)
    folded = ((wide << 1) ^ (wide >> 31)).astype(np.uint16)
    low, high = (folded & 0xFF).astype(np.uint8), (folded >> 8).astype(np.uint8)
    return zlib.compress(low.tobytes() + high.tobytes(), LEVEL)


def _spread(data: bytes) -> Shorts:
    both = np.frombuffer(zlib.decompress(data), np.uint8).reshape(2, -1).astype(np.uint16)
    folded = both[0] | (both[1] << np.uint16(8))
    out: Shorts = ((folded >> np.uint16(1)) ^ (np.uint16(0) - (folded & np.uint16(1)))).astype(np.int16)
    return out
