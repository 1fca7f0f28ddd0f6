"""float16 tiles, [32 k][16 n]."""

from __future__ import annotations

from flexspec.kernels.cpu.weight_formats.registry import CpuFormat, k_major

FORMAT = CpuFormat("f16", tile_bytes=1024, tiles=k_major)
