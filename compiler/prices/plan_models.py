"""Price profiles of models. A bare config.json is enough, since planning needs shapes but no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flexspec.compiler.frontends.files import read_json_object
from flexspec.compiler.frontends.huggingface import FUSED_STATE, fused_state, read_config
from flexspec.compiler.frontends.open_model import open_model
from flexspec.compiler.frontends.settings import Settings
from flexspec.compiler.prices.price_only import OPT, OPT_NOTE, build_opt, opt_config
from flexspec.compiler.prices.profile import ModelProfile, profile_model
from flexspec.errors import ModelConfigError
from flexspec.models.config import ModelConfig
from flexspec.models.registry import build_model
from flexspec.ops.experts import expected_experts
from flexspec.types import DType, WeightFormat

EXPECTED = "a config.json, a Hugging Face folder or a .gguf file"


def open_profile(
    path: Path,
    dtype: DType,
    degrees: Sequence[int] = (1,),
    *,
    ssm: bool = False,
    weights: WeightFormat | None = None,
) -> ModelProfile:
    """The price profile of a model. Raises the loaders' errors (ModelFileError, ModelConfigError)."""
    profile = partial(profile_model, degrees=degrees, ssm=ssm, weights=weights)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        model = open_model(path, EXPECTED)
        return profile(path.stem, model.config, dtype, build_model)
    settings = Settings(read_json_object(file, "a Hugging Face config.json"), file)
    name = path.resolve().name if path.is_dir() else path.stem
    if OPT in settings.strings("architectures"):
        config = opt_config(settings)
        return profile(name, config, dtype, build_opt, note=OPT_NOTE)
    config, architecture = read_config(settings, file)
    build = build_model
    if architecture == FUSED_STATE:
        if not ssm:
            raise ModelConfigError(f"{file} is an SSM of architecture {FUSED_STATE}", "an LLM", "pass it with --ssm")
        fused = fused_state(settings, config)
        build = partial(build_model, **fused.build_options)
        return replace(profile(name, config, dtype, build), taps=fused.tap_layers)
    return profile(name, config, dtype, build, note=_experts_note(config))


def _experts_note(config: ModelConfig) -> str:
    """The assumption behind the prices of a mixture of experts."""
    if not config.experts:
        return ""
    one, many = (expected_experts(config.experts, config.experts, config.experts_per_token, rows) for rows in (1, 16))
    return (
        f"a step is priced by the number of experts that its rows would read if each row chose at random: {one:.1f} of "
        f"{config.experts} for one row, {many:.1f} for 16; rows of one text make similar choices and read fewer"
    )


def check_same_vocabulary(llm: ModelConfig, ssms: Sequence[ModelProfile]) -> None:
    """Raise ModelConfigError for an SSM whose vocabulary is not the LLM's."""
    for ssm in ssms:
        if ssm.config.vocab_size != llm.vocab_size:
            raise ModelConfigError(
                f"SSM {ssm.name} with a vocabulary of {ssm.config.vocab_size}",
                f"the LLM's, {llm.vocab_size}",
                "choose an SSM with the same tokenizer",
            )
