"""suffix: copies from the request's own text (runtime/drafters/suffix.py)."""

from flexspec.drafters.record import DrafterRecord

DRAFTER = DrafterRecord("suffix", help="the request's own text", order=0)
