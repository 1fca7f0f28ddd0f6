"""What the LLM is asked to invent: openings of user turns by kind of task, and tasks about its own earlier texts.

Magpie's observation (arXiv 2406.08464): a chat model that is given the user header and nothing else writes a plausible
user message. A few opening words choose the kind. Every prompt is a function of (seed, index, earlier texts): nothing
here depends on timing or batching. No outside text is used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from flexspec.errors import TokenizerError
from flexspec.runtime.tune.config import GenerateConfig

# Openings end inside a sentence, where the LLM continues. Kinds in _LONG contain a passage and may be longer.
OPENINGS: dict[str, tuple[str, ...]] = {
    "free": ("",),
    "writing": ("Write a short story about", "Write an email to", "Compose a poem", "Draft a blog post about",
                "Write a product description for", "Help me write a letter", "Write a review of"),
    "roleplay": ("Pretend you are", "You are a", "Act as", "Imagine that you are a", "Let's play a game in which you"),
    "reasoning": ("Why does", "Which of these is", "If all", "What would happen if", "Think step by step:",
                  "Is it possible that", "What comes next in the sequence"),
    "math": ("Solve the equation", "What is the value of", "Find the area of", "Calculate", "Simplify",
             "What is the probability", "Given the function f(x)"),
    "coding": ("Write a Python function that", "Write a program in", "How do I implement", "Fix the bug in this code:",
               "Write a SQL query", "Explain what this code does:", "Create a class"),
    "extraction": ("Extract all the names from the following text:", "List every date mentioned below.\n\n",
                   "Read the paragraph and give the key facts as JSON:", "Find the products and prices in this text:"),
    "stem": ("Explain how", "What is the difference between", "Describe the process of", "What are the properties of",
             "How do scientists", "What causes"),
    "humanities": ("Discuss the history of", "What was the role of", "How did the", "Compare the philosophies of",
                   "Describe the culture of", "What led to"),
    "translation": ("Translate this German sentence into English: Der", "Translate from German to English: Wir haben",
                    "Translate into English: Die", "Translate this French text into English: Le",
                    "Put this Spanish text into English: Los", "Translate German to English: Es gibt"),
    "summarization": ("Summarize this article: ", "Give a short summary of the following news report.\n\n",
                      "Sum up this text in two sentences: ", "What are the main points of this passage?\n\n"),
    "qa": ("Who was the first", "When was", "Where is", "What is the name of the", "How many", "Who wrote",
           "Which country"),
    "word_problem": ("A baker makes", "Tom has", "There are 36", "A car travels", "Maria earns $", "In a class of",
                     "A box holds", "Every week, Sam"),
    "documents": ("Answer the question from the passage.\n\nPassage: ", "Context: ",
                  "Use the text below to answer.\n\nText: "),
}  # fmt: skip
_LONG = ("extraction", "summarization", "documents")
_SUMMARISE = ("Summarize the text below.\n\n", "Give a brief summary of this passage: ", "TL;DR of the following:\n\n")
_TRANSLATE = ("Translate into German: ", "Translate these sentences to French: ", "Translate to Spanish:\n")
_REWRITE = ("Rewrite this in simpler words: ", "Fix the grammar of this text: ", "Make this text shorter:\n\n")
_QUESTIONS = ("What is the main idea?", "List the key points.", "What happened, and why?", "Which names occur?",
              "What can one conclude from it?")  # fmt: skip
_EXTRACT = ("Extract all names and places from this text: ", "List the facts of this passage as bullet points.\n\n",
            "Which numbers appear in the text below, and what do they stand for?\n\n")  # fmt: skip
_RECENT = 1500  # tasks are about the latest so many texts


@dataclass(frozen=True, slots=True)
class Text:
    """A finished earlier conversation."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A user turn to generate."""

    kind: str
    text: str
    invented_tokens: int  # at most, that the LLM adds to ``text``; 0: ``text`` is the complete turn
    answer_temperature: float


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The chat template around one user turn, as text: ``before`` + user text + ``after`` + answer."""

    before: str
    after: str

    @classmethod
    def from_rendered(cls, rendered: str, user_text: str) -> ChatFrame:
        """Split a rendered single-turn prompt at its user text. Raises TokenizerError if the text is not in it once."""
        parts = rendered.split(user_text)
        if len(parts) != 2:
            raise TokenizerError(
                f"a chat template that shows the user's text {len(parts) - 1} times", "exactly once",
                "use a model whose chat template prints the user turn as it is",
            )  # fmt: skip
        return cls(parts[0], parts[1])


def plan_prompt(index: int, config: GenerateConfig, earlier: Sequence[Text]) -> PromptPlan:
    """The prompt of conversation ``index``; ``earlier`` are the texts of finished shards it may build on."""
    rng = random.Random(f"plan/{config.seed}/{index}")
    temperature = 0.0 if rng.random() < config.greedy_share else config.answer_temperature
    recent = earlier[-_RECENT:]
    if recent and rng.random() < config.task_share:
        kind, text = _task(rng, recent)
        return PromptPlan(kind, text, 0, temperature)
    kind = rng.choice(sorted(OPENINGS))
    limit = config.max_passage_tokens if kind in _LONG else config.max_invented_tokens
    return PromptPlan(kind, rng.choice(OPENINGS[kind]), limit, temperature)


def _task(rng: random.Random, earlier: Sequence[Text]) -> tuple[str, str]:
    """A task about earlier texts: (kind, user turn)."""
    text = rng.choice(earlier)
    kind = rng.choice(("summarization", "summarization", "translation", "documents", "documents", "reading",
                       "extraction", "rewriting"))  # fmt: skip
    if kind == "summarization":
        passage = "\n\n".join(t.answer for t in (text, *rng.sample(earlier, min(len(earlier), rng.randrange(3)))))
        return kind, rng.choice(_SUMMARISE) + passage
    if kind == "translation":
        return kind, rng.choice(_TRANSLATE) + _sentences(text.answer, rng.randrange(1, 4))
    if kind == "documents":
        documents = [text.answer, *(t.answer for t in rng.sample(earlier, min(len(earlier), 2)))]
        rng.shuffle(documents)
        shown = "\n\n".join(f"[{i}] {document[:900]}" for i, document in enumerate(documents, 1))
        return (
            kind,
            f"Answer the question with the help of these documents.\n\n{shown}\n\nQuestion: {text.question[:240]}",
        )
    if kind == "reading":
        return kind, f"{text.answer}\n\nAbout the text above: {rng.choice(_QUESTIONS)}"
    if kind == "extraction":
        return kind, rng.choice(_EXTRACT) + text.answer
    return kind, rng.choice(_REWRITE) + _sentences(text.answer, rng.randrange(2, 6))


def _sentences(text: str, count: int) -> str:
    return ". ".join(text.split(". ")[:count])
