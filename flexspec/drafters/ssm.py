"""ssm, ssm2, ...: token trees of the artifact's small speculative models (runtime/drafters/ssm.py)."""

from flexspec.drafters.record import DrafterRecord, DraftOption

DRAFTER = DrafterRecord(
    "ssm",
    help="the artifact's SSMs",
    order=2,
    options=(
        DraftOption("ssm_depth", default=2, highest=64, help="levels of an SSM's own tree (budget)"),
        DraftOption("beam", default=4, highest=255, help="nodes extended at each level of it (budget)"),
    ),
    runs_ssms=True,
)
