"""`gym doctor`: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from gym_sdk.cli import console


def doctor(
    *,
    report: Annotated[bool, Parameter(negative="", help="As Markdown, to paste into a bug report.")] = False,
    json: Annotated[bool, Parameter(negative="", help="For scripts.")] = False,
) -> int:
    """Say what this machine can do and what is missing. No name of a person, machine or folder is shown."""
    from gym_serve.libraries import quieten_libraries
    from gym_trainer.diagnosis import diagnose

    quieten_libraries()
    found = diagnose()
    if json:
        console.out_json(found.to_json())
    else:
        console.out(found.markdown() if report else found.text())
    return 0
