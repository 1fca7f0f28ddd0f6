"""The generated conversations on disk: shards of token ids and LLM states, written once, read by memory map.

A shard is two files: ``shard-00012.states.npy`` (bfloat16 bit patterns, uint16 [tokens, J*E]: the LLM states the SSM
reads) and ``shard-00012.npz`` (ids, lengths, temperatures, kinds). The second is renamed into place last, so a shard
that has it is complete. Shape letters: N tokens of a shard, J taps, E hidden.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexspec.errors import TuneError
from flexspec.host.files import new_file


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt and its answer."""

    index: int
    kind: str
    temperature: float
    prompt_tokens: int
    ids: NDArray[np.int32]  # of the prompt, then of the answer
    states: NDArray[np.uint16]  # bf16 bits [len(ids), J*E]; may be a memory map

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.ids[: self.prompt_tokens]

    @property
    def answer(self) -> NDArray[np.int32]:
        return self.ids[self.prompt_tokens :]


def _paths(folder: Path, shard: int) -> tuple[Path, Path]:
    return folder / f"shard-{shard:05d}.npz", folder / f"shard-{shard:05d}.states.npy"


def shard_exists(folder: Path, shard: int) -> bool:
    return _paths(folder, shard)[0].is_file()


def write_shard(folder: Path, shard: int, conversations: Sequence[Conversation]) -> None:
    """Write one complete shard; an interrupted write leaves a shard that does not exist."""
    table, states = _paths(folder, shard)
    for path in (states, table):
        with new_file(path) as file:
            if path is states:
                np.save(file, np.concatenate([c.states for c in conversations]))
            else:
                np.savez(
                    file,
                    ids=np.concatenate([c.ids for c in conversations]).astype(np.int32),
                    lengths=np.array([len(c.ids) for c in conversations], np.int64),
                    prompts=np.array([c.prompt_tokens for c in conversations], np.int64),
                    temperatures=np.array([c.temperature for c in conversations], np.float64),
                    indices=np.array([c.index for c in conversations], np.int64),
                    kinds=np.array([c.kind for c in conversations]),
                )


def read_shard(folder: Path, shard: int) -> list[Conversation]:
    """The conversations of one shard, states memory-mapped. Raises TuneError if a file is missing or damaged."""
    table, states_path = _paths(folder, shard)
    try:
        states = np.load(states_path, mmap_mode="r", allow_pickle=False)
        with table.open("rb") as file, np.load(file, allow_pickle=False) as t:
            ends = np.cumsum(t["lengths"])
            ids, rows = t["ids"], zip(t["indices"], t["kinds"], t["temperatures"], t["prompts"], ends, strict=True)
            if len(ids) != ends[-1] or len(states) != ends[-1]:
                raise ValueError(f"{len(ids)} ids and {len(states)} states for {ends[-1]} tokens")
            conversations, start = [], 0
            for index, kind, temperature, prompt, end in rows:
                conversations.append(
                    Conversation(int(index), str(kind), float(temperature), int(prompt), ids[start:end],
                                 states[start:end])
                )  # fmt: skip
                start = int(end)
            return conversations
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise TuneError(
            f"shard {shard} in {folder} cannot be read: {error}", "a complete shard of an earlier run",
            f"delete {table.name} and run the command again to create it again",
        ) from error  # fmt: skip


def read_corpus(folder: Path, shards: int) -> list[Conversation]:
    """All conversations in order, without those whose prompt occurred before and those with no answer."""
    seen: set[bytes] = set()
    conversations: list[Conversation] = []
    for shard in range(shards):
        for conversation in read_shard(folder, shard):
            key = conversation.prompt.tobytes()
            if len(conversation.answer) >= 2 and key not in seen:
                seen.add(key)
                conversations.append(conversation)
    return conversations


def is_held_out(index: int, every: int) -> bool:
    """True for conversations that are measured on, never trained on."""
    return index % every == every - 1


def split(corpus: Sequence[Conversation], every: int) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held out)."""
    return (
        [c for c in corpus if not is_held_out(c.index, every)],
        [c for c in corpus if is_held_out(c.index, every)],
    )


def frequent_tokens(train: Sequence[Conversation], vocab_size: int, size: int) -> NDArray[np.int64]:
    """The ``size`` token ids most frequent in answers (a prompt's token counts a tenth), most frequent first."""
    counts = np.zeros(vocab_size, np.float64)
    for c in train:
        counts += np.bincount(c.answer, minlength=vocab_size) + 0.1 * np.bincount(c.prompt, minlength=vocab_size)
    order: NDArray[np.int64] = np.argsort(-counts, kind="stable")[:size].astype(np.int64)
    return order


def sequences(corpus: Sequence[Conversation]) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of each conversation, for the n-gram table."""
    for c in corpus:
        yield c.prompt.tolist(), c.answer.tolist()
