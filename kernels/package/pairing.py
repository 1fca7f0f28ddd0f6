"""Whether SSMs and their LLM belong together, which no later step would notice: drafts would only be wrong."""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.errors import CompileError


def check_pairing(llm: LoadedModel, ssms: Sequence[LoadedModel]) -> None:
    """Raises CompileError for SSMs of another vocabulary (sglang#24051), or two that read hidden states."""
    fused = [ssm for ssm in ssms if ssm.fused is not None]
    if len(fused) > 1:
        raise CompileError(
            f"{len(fused)} SSMs that read hidden states", "at most one", "give one of them, beside any plain SSMs"
        )
    for ssm in ssms:
        if ssm.config.vocab_size != llm.config.vocab_size:
            raise CompileError(
                f"SSM {ssm.name} has a vocabulary of {ssm.config.vocab_size}",
                f"the LLM's, {llm.config.vocab_size}",
                "use an SSM made for this LLM (flexspec tune makes one)",
            )
        both = ssm.tokenizer_json and llm.tokenizer_json
        if both and _vocabulary(ssm.tokenizer_json) != _vocabulary(llm.tokenizer_json):
            raise CompileError(
                f"SSM {ssm.name} has another tokenizer of the same size",
                "the LLM's own tokens",
                "use an SSM made for this LLM (flexspec tune makes one)",
            )


def _vocabulary(tokenizer_json: bytes | None) -> dict[str, int]:
    from tokenizers import Tokenizer

    assert tokenizer_json is not None
    return dict(Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True))
