"""The command line of the campaigns: jobs one after another, a table, a JSON file.

Owns what is printed. Exit code 1 when a job was not as it should be, 2 when none could be run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.chaos.chaos_campaign import ChaosCampaign
from campaigns.soak.soak_campaign import SoakCampaign
from campaigns.zygotes import StarterError

__all__ = ["main"]

_WRITE_S = 10.0  # between two files of a campaign in which all is well
_CAMPAIGNS = (ChaosCampaign, SoakCampaign)
Campaign = ChaosCampaign | SoakCampaign


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; the exit code."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ranks are ended on the way out
    campaign: Campaign = options.campaign(options)
    results: list[dict[str, Any]] = []
    written = time.monotonic()
    try:
        for result in campaign.results():
            results.append(result)
            if lines := campaign.lines(result):
                print("\n".join(lines), flush=True)
            if result["problems"] or time.monotonic() > written + _WRITE_S:
                _write(options.json, campaign, results)
                written = time.monotonic()
    except (StarterError, ValueError) as error:
        print(f"{campaign.name}: {error}", file=sys.stderr)
        return 2
    finally:
        _write(options.json, campaign, results)
    if results:
        print("\n".join(campaign.summary(results)))
    return 1 if any(result["problems"] for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns", description="Run many jobs of hsgd, and judge each of them."
    )
    commands = parser.add_subparsers(required=True, metavar="CAMPAIGN")
    for campaign in _CAMPAIGNS:
        command = commands.add_parser(
            campaign.name,
            help=campaign.about,
            description=campaign.about,
            epilog=campaign.epilog(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        campaign.add_options(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
        command.set_defaults(campaign=campaign)
    return parser


def _write(path: Path | None, campaign: Campaign, results: list[dict[str, Any]]) -> None:
    if path is not None and results:
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**campaign.report(results), "results": results}))
        part.rename(path)


if __name__ == "__main__":
    sys.exit(main())
