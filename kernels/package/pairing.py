"""Whether SSMs and their LLM belong together, which no later step would notice: drafts would only be wrong."""

from __future__ import annotations

from collections.abc import Sequence

from flexspec.compiler.frontends.loaded_model import LoadedModel
from flexspec.compiler.frontends.token_rows import token_ids
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
        wrong = _first_difference(ssm, llm)
        if wrong is not None:
            raise CompileError(
                f"SSM {ssm.name} has another tokenizer: id {wrong} is another token",
                "the LLM's own tokens",
                "use an SSM made for this LLM (flexspec tune makes one)",
            )


def _first_difference(ssm: LoadedModel, llm: LoadedModel) -> int | None:
    """The first id whose tokens differ; tokens behind the LLM's vocabulary are nobody's."""
    if not ssm.tokenizer_json or not llm.tokenizer_json:
        return None
    ours, theirs = (
        {token: text for text, token in token_ids(each).items() if token < llm.config.vocab_size}
        for each in (ssm.tokenizer_json, llm.tokenizer_json)
    )
    return min((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), default=None)
