"""Drafting on other ranks: what rank 0 sends to an SSM's rank, the trees that come back, and both ends of that link.

A message holds what happened to requests since the last one (begun, committed, ended), in order, and the draft requests
of a round; the answer holds their trees. An SSM's contexts, pages and steps stay on its rank.
Bodies are JSON, then raw arrays (features, laws), so that nothing is pickled and floats keep their bits.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flexspec.draft_plan import DraftPlan
from flexspec.errors import EngineError
from flexspec.runtime.distributed.message import Bytes
from flexspec.runtime.drafters.base import DraftRequest, ModelDrafter
from flexspec.runtime.drafters.worth import StepWorth
from flexspec.sampling import LAW_FIELDS, SamplingParams
from flexspec.tree import TokenTree

_GREEDY = SamplingParams()
_LENGTH_BYTES = 8


class DraftPeer(Protocol):
    """A connection to one rank that drafts; answers come in the order of the requests."""

    def send(self, body: Bytes) -> None:
        """Raises EngineError when the rank is gone."""
        ...

    def receive(self) -> Bytes: ...


class _Mailbox:
    """Requests drafted on another rank: what happens to them is sent along with the next draft request."""

    def __init__(self, peer: DraftPeer, *, reads_features: bool) -> None:
        self.peer = peer
        self._reads_features = reads_features
        self._events: list[list[Any]] = []
        self._arrays: list[NDArray[np.float32]] = []

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        self._record(["begin", request_id, list(prompt_ids)])

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        if self._reads_features:
            self._record(["prompt", request_id, start], features_KE)

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        tokens = [int(token) for token in committed]
        self._record(["observe", request_id, tokens], features_KE if self._reads_features else None)

    def end(self, request_id: int) -> None:
        self._record(["end", request_id])

    def send(self, name: str, plan: DraftPlan, requests: Sequence[DraftRequest]) -> None:
        encoded = [_encode_request(plan, request) for request in requests]
        self.peer.send(
            encode({"ssm": name, "events": self._events, "plan": str(plan), "requests": encoded}, self._arrays)
        )
        self._events, self._arrays = [], []

    def _record(self, event: list[Any], features_KE: NDArray[np.float32] | None = None) -> None:
        self._events.append([*event, list(features_KE.shape) if features_KE is not None else None])
        if features_KE is not None:
            self._arrays.append(np.array(features_KE, np.float32))  # a copy: the step reuses its buffer


@dataclass(frozen=True, slots=True)
class _PendingDraft:
    """A draft that has started and not finished."""

    plan: DraftPlan
    requests: list[DraftRequest]
    mailboxes: list[_Mailbox]
    local: list[DraftRequest]  # those of this process's own drafter
    seconds: float  # that this process has spent on it so far


class RemoteDrafter:
    """Rank 0's end for one SSM: a DistantDrafter. Each request belongs to one of the SSM's ranks, the least busy one.

    ``local`` is the drafter of this process, if it is one of the SSM's ranks. Raises EngineError when a rank is gone or
    its answer is invalid.
    """

    def __init__(
        self,
        name: str,
        peers: Sequence[DraftPeer],
        local: ModelDrafter | None,
        *,
        reads_features: bool,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.reads_features = name, reads_features
        self.worth: StepWorth | None = None
        self._local = local
        self._mailboxes = [_Mailbox(peer, reads_features=reads_features) for peer in peers]
        self._drafters: list[ModelDrafter | _Mailbox] = [*([local] if local is not None else []), *self._mailboxes]
        self._assigned: dict[int, ModelDrafter | _Mailbox] = {}  # by request
        self._plan: DraftPlan | None = None
        self._pending: deque[_PendingDraft] = deque()
        self._clock = clock

    def use(self, plan: DraftPlan) -> None:
        self._plan = plan

    def begin(self, request_id: int, prompt_ids: Sequence[int]) -> None:
        self.end(request_id)
        assigned = list(self._assigned.values())
        drafter = self._assigned[request_id] = min(self._drafters, key=assigned.count)
        drafter.begin(request_id, prompt_ids)

    def observe_prompt(self, request_id: int, start: int, features_KE: NDArray[np.float32] | None) -> None:
        if request_id in self._assigned:
            self._assigned[request_id].observe_prompt(request_id, start, features_KE)

    def observe(self, request_id: int, committed: Sequence[int], features_KE: NDArray[np.float32] | None) -> None:
        if request_id in self._assigned:
            self._assigned[request_id].observe(request_id, committed, features_KE)

    def end(self, request_id: int) -> None:
        if request_id in self._assigned:
            self._assigned.pop(request_id).end(request_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.start(requests)
        return self.finish()

    def start(self, requests: Sequence[DraftRequest]) -> None:
        assert self._plan is not None, "use() comes first"
        began = self._clock()
        shares = [(mailbox, self._share(requests, mailbox)) for mailbox in self._mailboxes]
        shares = [(mailbox, share) for mailbox, share in shares if share]
        for mailbox, share in shares:
            mailbox.send(self.name, self._plan, share)
        local = [] if self._local is None else self._share(requests, self._local)
        mailboxes = [mailbox for mailbox, _ in shares]
        self._pending.append(_PendingDraft(self._plan, list(requests), mailboxes, local, self._clock() - began))

    def finish(self) -> list[TokenTree]:
        """The trees of the oldest draft. Requests that ended meanwhile get a root-only tree, if any."""
        draft = self._pending.popleft()
        began = self._clock()
        trees: dict[int, TokenTree] = {}
        if self._local is not None and draft.local:
            self._local.use(draft.plan)
            ids = [request.request_id for request in draft.local]
            trees.update(zip(ids, self._local.propose(draft.local), strict=True))
        for mailbox in draft.mailboxes:
            trees.update(decode_trees(mailbox.peer.receive(), self.name))
        if self.worth is not None:
            self.worth.ran(0, draft.seconds + self._clock() - began)
        return [trees.get(request.request_id) or TokenTree.root_only(request.last_token) for request in draft.requests]

    def _share(self, requests: Sequence[DraftRequest], drafter: ModelDrafter | _Mailbox) -> list[DraftRequest]:
        return [request for request in requests if self._assigned.get(request.request_id) is drafter]


class DraftHost:
    """The end of a rank that drafts: applies each message to its SSMs' drafters, by name."""

    def __init__(self, drafters: Sequence[ModelDrafter]) -> None:
        self._drafters = {drafter.name: drafter for drafter in drafters}

    def answer(self, body: Bytes) -> Bytes:
        """The trees that a message asks for. Raises EngineError for an invalid one."""
        try:
            head, array = decode(body)
            drafter = self._drafters[head["ssm"]]
            for kind, request_id, *rest in head["events"]:
                shape = rest.pop()
                features = array(np.float32, *shape) if shape is not None else None
                _apply(drafter, kind, request_id, rest, features)
            drafter.use(DraftPlan.parse(head["plan"]))
            requests = [
                DraftRequest(ident, last, nodes, depth, SamplingParams(**params) if params else _GREEDY, seed)
                for ident, last, nodes, depth, params, seed in head["requests"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise _garbled(error) from None
        return encode_trees([request.request_id for request in requests], drafter.propose(requests))


def _apply(
    drafter: ModelDrafter, kind: str, request_id: int, rest: Sequence[Any], features: NDArray[np.float32] | None
) -> None:
    match kind:
        case "begin":
            drafter.begin(request_id, rest[0])
        case "prompt":
            drafter.observe_prompt(request_id, rest[0], features)
        case "observe":
            drafter.observe(request_id, rest[0], features)
        case "end":
            drafter.end(request_id)
        case _:
            raise ValueError(f"an event {kind!r}")


def _encode_request(plan: DraftPlan, request: DraftRequest) -> list[Any]:
    """Sampling parameters are sent only if nodes are drawn by them."""
    params = {name: getattr(request.params, name) for name in LAW_FIELDS} if plan.sampled == "mixed" else None
    return [request.request_id, request.last_token, request.max_nodes, request.max_depth, params, request.seed]


def encode_trees(ids: Sequence[int], trees: Sequence[TokenTree]) -> Bytes:
    """Trees of requests; drawn nodes with their laws, float64 [V]."""
    rows = [
        [ident, list(map(int, tree.tokens)), list(tree.parents), list(map(float, tree.scores)), sorted(tree.laws)]
        for ident, tree in zip(ids, trees, strict=True)
    ]
    laws = [tree.laws[node] for tree in trees for node in sorted(tree.laws)]
    return encode({"trees": rows, "vocab": len(laws[0]) if laws else 0}, laws)


def decode_trees(body: Bytes, source: str) -> dict[int, TokenTree]:
    """Request id -> tree. Raises EngineError for an invalid answer."""
    try:
        head, array = decode(body)
        return {
            int(ident): TokenTree(
                tuple(tokens), tuple(parents), ("root",) + (source,) * (len(tokens) - 1), tuple(scores),
                {node: array(np.float64, head["vocab"]) for node in drawn},
            )
            for ident, tokens, parents, scores, drawn in head["trees"]
        }  # fmt: skip
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise _garbled(error) from None


def encode(head: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> Bytes:
    """One run of bytes, writable as torch requires: length of the JSON, the JSON, the arrays one after another."""
    text = json.dumps(head, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little"), text, *(np.ascontiguousarray(a).tobytes() for a in arrays)]
    return np.frombuffer(bytearray().join(parts), np.uint8)


def decode(body: Bytes) -> tuple[dict[str, Any], Callable[..., NDArray[Any]]]:
    """The JSON, and a function that takes the next array of a dtype and shape. Raises ValueError for other bytes."""
    data = body.tobytes()
    at = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    head = json.loads(data[_LENGTH_BYTES:at])
    if not isinstance(head, dict):
        raise ValueError("the head is not an object")

    def take(dtype: type[np.generic], *shape: int) -> NDArray[Any]:
        nonlocal at
        count = int(np.prod(shape))
        array = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += array.nbytes
        return array

    return head, take


def _garbled(error: Exception) -> EngineError:
    return EngineError(
        f"a draft message that cannot be read ({error!r})", "one as runtime/distributed/drafts.py writes it",
        "protocol mismatch between ranks; please report it",
    )  # fmt: skip
