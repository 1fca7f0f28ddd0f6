"""Attention over a paged cache, for token trees and chains: ``attend``, and ``merge`` for several splits."""

from __future__ import annotations

from flexspec.kernels.gpu.attention import launch, variant
from flexspec.kernels.gpu.attention.check import check_cases
from flexspec.kernels.gpu.attention.variant import AttentionVariant, TileConfig
from flexspec.kernels.gpu.family import KernelFamily

FAMILY: KernelFamily[AttentionVariant, TileConfig] = KernelFamily(
    name=AttentionVariant.family,
    template="attention.py.j2",
    config_type=TileConfig,
    variant_of=variant.variant_of,
    entries=lambda _: variant.ENTRIES,
    configs=variant.candidate_configs,
    plain_config=variant.PLAIN_CONFIG,
    values=variant.template_values,
    run=launch.run,
    cases=check_cases,
)
