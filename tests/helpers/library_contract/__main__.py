"""Command line: check our source against the oldest and the newest supported releases, or against those named."""

import argparse
import sys
from pathlib import Path

from library_contract.check import ROOT, Result, check_releases, format_results
from library_contract.releases import LIBRARIES, FetchError, obtain, oldest_and_newest


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if nothing is missing, 1 if something is, 2 if a release could not be fetched."""
    parser = argparse.ArgumentParser(prog="python -m library_contract", description=__doc__)
    parser.add_argument(
        "releases",
        nargs="*",
        type=named_release,
        help="releases to check in place of the newest supported ones, as in vllm==0.32.0; those of the other "
        "libraries are the newest supported ones",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "contract", help="folder for downloads")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    try:
        oldest, newest = oldest_and_newest(ROOT / "pyproject.toml", options.folder)
        if options.releases:
            named = dict(options.releases)
            others = [each for each in newest if each.library not in named]
            chosen = [obtain(library, version, options.folder) for library, version in named.items()]
            sets = [[*chosen, *others]]
        else:
            sets = [oldest, newest]
        for releases in sets:
            done = [(each.release.library, each.release.version) for each in results]
            found = check_releases(ROOT, releases)
            results += [
                each for each in found if each.problems or (each.release.library, each.release.version) not in done
            ]
    except FetchError as error:
        print(error, file=sys.stderr)
        return 2
    print(format_results(results))
    return 1 if any(each.problems for each in results) else 0


def named_release(text: str) -> tuple[str, str]:
    """Return library and version of `vllm==0.32.0`."""
    library, _, version = text.partition("==")
    if library not in LIBRARIES or not version:
        raise argparse.ArgumentTypeError(f"{text!r} must be LIBRARY==VERSION with one of {', '.join(LIBRARIES)}")
    return library, version


if __name__ == "__main__":
    sys.exit(main())
