"""Every user-facing error: a stable code, what was found, what was expected, and the fix.

Owns the hierarchy only; whoever raises an error writes its text. Asserts are for our own bugs, never for users.
"""

from __future__ import annotations

from typing import ClassVar


class FlexspecError(Exception):
    """Base of all user-facing errors. ``code`` is stable across releases."""

    code: ClassVar[str] = "FS000"

    def __init__(self, found: str, expected: str, fix: str) -> None:
        self.found = found
        self.expected = expected
        self.fix = fix
        super().__init__(f"{self.code}: {found}; expected {expected}. Fix: {fix}")


class GraphError(FlexspecError):
    """A graph breaks a rule: unknown operator, wrong types, use before definition."""

    code = "FS101"


class GraphTextError(FlexspecError):
    """The text form of a graph does not parse."""

    code = "FS102"


class PassError(FlexspecError):
    """A pass produced a graph that the verifier rejects; the message names the pass."""

    code = "FS103"


class PartitionError(FlexspecError):
    """A graph cannot be cut into the requested stages and ranks."""

    code = "FS104"


class ModelConfigError(FlexspecError):
    """A model configuration is incomplete, contradictory or not supported."""

    code = "FS201"


class WeightError(FlexspecError):
    """A weight is missing, unexpected, or of the wrong shape or dtype."""

    code = "FS202"


class ModelFileError(FlexspecError):
    """A model file is truncated, damaged, a pointer to something else, or of an unknown format."""

    code = "FS203"


class TokenizerError(FlexspecError):
    """A tokenizer or chat template is missing, damaged or does not fit the model."""

    code = "FS204"


class ImportProgramError(FlexspecError):
    """A traced program contains something that has no canonical operator; names the op and the user's line."""

    code = "FS205"


class CompileError(FlexspecError):
    """Code generation or compilation failed."""

    code = "FS301"


class ToolchainError(FlexspecError):
    """A compiler or tool that this step needs is not installed."""

    code = "FS302"


class ArtifactError(FlexspecError):
    """An .fspec artifact is damaged, of another version, or built for another machine."""

    code = "FS401"


class StorageError(FlexspecError):
    """A file or folder cannot be read or written: no space, no permission, no such folder."""

    code = "FS402"


class RequestError(FlexspecError):
    """A request asks for something that is invalid or not offered (HTTP 400)."""

    code = "FS501"

    def __init__(self, found: str, expected: str, fix: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(found, expected, fix)


class CapacityError(FlexspecError):
    """A request or configuration needs more memory, context or slots than available."""

    code = "FS502"


class QueueFullError(CapacityError):
    """No room for a request right now (HTTP 503); the client may retry after ``retry_after_s`` seconds."""

    code = "FS503"

    def __init__(self, found: str, expected: str, fix: str, *, retry_after_s: int = 1) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(found, expected, fix)


class EngineError(FlexspecError):
    """The engine cannot continue: a step failed or a rank is gone."""

    code = "FS601"


class PortError(FlexspecError):
    """The server cannot bind its address."""

    code = "FS602"


class TuneError(FlexspecError):
    """Training an SSM, or generating its data, cannot continue."""

    code = "FS701"


class MachineError(FlexspecError):
    """A machine file is unreadable, incomplete, or has invalid values."""

    code = "FS801"


class PlanError(FlexspecError):
    """No plan fits the machine, or a plan file cannot be run."""

    code = "FS802"


class ProfileError(FlexspecError):
    """An acceptance profile is unreadable, incomplete or contradicts itself."""

    code = "FS803"
