"""float32 tiles, [32 k][16 n]."""

from __future__ import annotations

from flexspec.kernels.cpu.weight_formats.registry import CpuFormat, k_major

FORMAT = CpuFormat("f32", tile_bytes=2048, tiles=k_major)
